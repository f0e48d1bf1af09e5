"""The suspected straggler ranks, read from stacks; and the files of a hang report."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.workers.controller.test_flight_recorder import dump, entry
from trainer.cluster import hang_report as module
from trainer.cluster.hang_report import CONTROLLER, Stall, Verdict, ended_in_collective, of_rank, record, summary, verdict, where
from workers.controller.process_inspection import GONE, ProcessState, RankState

ROOT = Path(module.__file__).parents[2]
TORCH = "/venv/lib/python3.11/site-packages/torch"
SLEEPS = [(f"{ROOT}/workers/engine/fsdp/fsdp_engine.py", 120, "train_step")]
IN_COLLECTIVE = [(f"{TORCH}/distributed/distributed_c10d.py", 3000, "all_reduce"), *SLEEPS]
WRAPPED = [(f"{TORCH}/_ops.py", 1, "__call__"), (f"{TORCH}/distributed/_functional_collectives.py", 2, "wait_tensor"), *SLEEPS]
FORWARD = [(f"{TORCH}/nn/modules/linear.py", 5, "forward"), (f"{TORCH}/distributed/fsdp/_fully_shard/_fsdp_state.py", 6, "hook")]
MEETS = [(f"{ROOT}/workers/roles/worker.py", 90, "rendezvous_store"), (f"{ROOT}/workers/roles/worker.py", 40, "__init__")]
CHANNEL = [[(f"{ROOT}/workers/rollout/sync/channel.py", 120, name), *SLEEPS] for name in ("join_process_group", "run_collective")]
IDLE = [("/venv/lib/python3.11/site-packages/ray/worker.py", 7, "main_loop")]


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LIBRARIES", ("/venv/lib",))


def stacks(*threads: list[tuple[str, int, str]]) -> str:
    return "\n\n".join(
        "\n".join(
            ["Thread 0x1 (most recent call first):", *(f'  File "{file}", line {line} in {name}' for file, line, name in frames)]
        )
        for frames in threads
    )


def rank(
    number: int, *threads: list[tuple[str, int, str]], answered: bool = False, status: str = "sleeping", child: str = ""
) -> RankState:
    own = ProcessState(100 + number, "python worker", status, ("python: futex",), 2**20, stacks(*threads))
    children = (ProcessState(200 + number, "engine", child, ("engine: pipe",), 2**21, ""),) if child else ()
    return RankState(
        number, answered, (own, *children), Path(f"/run/logs/rank_{number}_workers.log"), ("hello", f"from {number}")
    )


def recording(state: RankState, *entries: dict[str, Any]) -> RankState:
    return replace(state, processes=(replace(state.processes[0], collectives=json.dumps({"nccl": dump(*entries)})),))


@pytest.mark.parametrize("waits", [IN_COLLECTIVE, WRAPPED, MEETS, *CHANNEL])
def test_rank_outside_the_collective_is_the_suspect(waits: list[tuple[str, int, str]]) -> None:
    found = verdict([rank(0, waits), rank(1, FORWARD), rank(2, waits)])
    assert found == Verdict([1], "it is in no collective, and ranks 0, 2 wait in one")


def test_collective_of_any_thread_counts() -> None:
    """On a GPU the backward runs in threads of its own."""
    assert verdict([rank(0, IN_COLLECTIVE, SLEEPS), rank(1, SLEEPS, SLEEPS)]).ranks == [1]


def test_rank_that_returned_without_the_collective_is_the_suspect() -> None:
    found = verdict([rank(0, IDLE, answered=True), rank(1, IN_COLLECTIVE)])
    assert found == Verdict([0], "it has ended its call, and rank 1 waits in a collective")
    assert verdict([rank(0, IDLE, answered=True), rank(1, IN_COLLECTIVE), rank(2, SLEEPS)]).ranks == [2], (
        "a rank that still works is likelier"
    )


def test_rank_that_timed_out_in_the_collective_is_not_the_suspect() -> None:
    assert verdict([rank(0, IDLE), rank(1, SLEEPS)], [0]) == Verdict([1], "it is in no collective, and rank 0 waits in one")


def test_dead_and_stopped_processes_are_the_first_suspects() -> None:
    assert verdict([rank(0, SLEEPS), rank(1, status=GONE)]) == Verdict([1], "its process is dead")
    assert verdict([rank(0, SLEEPS), rank(1, IN_COLLECTIVE, child="stopped")]).ranks == [1]
    assert verdict([rank(0, SLEEPS), rank(1, status="stopped")]).why.startswith("a process of it is stopped")


def test_rank_that_nccl_aborted_while_it_waited_is_not_the_suspect() -> None:
    own = rank(0, status=GONE)
    line = "[rank0]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)"
    ended = RankState(0, False, own.processes, own.log, (line, "Fatal Python error: Aborted"))
    assert verdict([ended, rank(1, SLEEPS)]) == Verdict([1], "it is in no collective, and rank 0 waits in one")
    assert verdict([ended, rank(1, status=GONE)]) == Verdict([1], "its process is dead")


def test_flight_recorder_precedes_stacks(tmp_path: Path) -> None:
    """On CUDA the rank that waits is in no call of torch.distributed."""
    entered = entry(17, "all_reduce", "dp", state="scheduled")
    states = [recording(rank(0, SLEEPS), entry(16, "broadcast", "dp"), entered), recording(rank(1, IN_COLLECTIVE))]
    found = verdict(states)
    collective = "all_reduce #17 of group dp (bfloat16, 4,194,304 elements)"
    assert found == Verdict([1], f"it has not entered {collective}, where rank 0 waits")
    stall = Stall(3, "update", states, [], found)
    lines = summary(stall, tmp_path, "there").splitlines()
    assert lines[1] == f"held up by rank 1: {found.why}"
    last = "broadcast #16 of group dp (bfloat16, 4,194,304 elements)"
    assert [line for line in lines if line.startswith("  ")] == [f"  in flight: {collective}, scheduled; last completed: {last}"]
    kept = record(stall, tmp_path)
    assert json.loads((kept / "rank_0_collectives.json").read_text())["nccl"]["entries"][1] == entered


def test_native_stacks_of_py_spy_are_in_the_report(tmp_path: Path) -> None:
    silent = replace(rank(0).processes[0], native="Thread 7\n    futex_wait (libc.so.6)\n")
    text = of_rank(Stall(1, "ask", [], [], Verdict([], "")), RankState(0, False, (silent,), None, ()))
    assert text.endswith("its threads wait in\npython: futex\nThread 7\n    futex_wait (libc.so.6)\n")


def test_rank_with_a_different_stack_is_the_suspect_on_gpu() -> None:
    """Ranks wait for one another in kernels there; the rollout engine's own NCCL is not recorded."""
    assert verdict([rank(0, FORWARD), rank(1, SLEEPS), rank(2, FORWARD)]) == Verdict([1], "it is elsewhere than the others")
    assert verdict([rank(0, SLEEPS), rank(1, SLEEPS), rank(2, IDLE, answered=True)]) == Verdict([0, 1], "")


def test_all_late_ranks_are_named_without_evidence() -> None:
    assert verdict([rank(0, SLEEPS), rank(1, SLEEPS), rank(2, SLEEPS)]) == Verdict([0, 1, 2], "")
    assert verdict([rank(0, SLEEPS), rank(1, MEETS[1:])]) == Verdict([0, 1], "")
    assert verdict([rank(0, IN_COLLECTIVE), rank(1, MEETS)]).ranks == [0, 1]
    assert verdict([rank(0, IN_COLLECTIVE), rank(1, MEETS), rank(2, IN_COLLECTIVE)]).ranks == [1], (
        "the one with a different stack"
    )
    assert verdict([]) == Verdict([], "")


@pytest.mark.parametrize(
    ("message", "ended"),
    [
        ("RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 3000ms for recv operation to complete", True),
        ("[rank0]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)", True),
        ("RuntimeError: Connection closed by peer [127.0.0.1]:7", False),
        ("TimeoutError: the reward timed out", False),
    ],
)
def test_timeout_error_of_a_collective_is_recognized(message: str, ended: bool) -> None:
    assert ended_in_collective(message) is ended


@pytest.mark.parametrize(
    ("frames", "location"),
    [
        (IN_COLLECTIVE, "workers/engine/fsdp/fsdp_engine.py:120 in train_step"),
        ([(module.__spec__.origin.replace("trainer/cluster/hang_report.py", "x"), 1, "y")], f"{ROOT}/x:1 in y"),
        ([("/elsewhere/loss.py", 4, "loss"), *SLEEPS], "/elsewhere/loss.py:4 in loss"),
        (IDLE[:0], ""),
    ],
)  # fmt: skip
def test_location_is_the_innermost_frame_of_the_project_or_the_user(frames: list[tuple[str, int, str]], location: str) -> None:
    threads = [IDLE, frames] if frames else []
    assert where(rank(0, *threads).processes[0]) == location


def stalled() -> Stall:
    states = [rank(0, IN_COLLECTIVE, child="stopped"), rank(1, SLEEPS), rank(2, IDLE, answered=True)]
    return Stall(3, "update", states, ["7 rows", "8 rows", "9 rows"], Verdict([1], "it sleeps"))


def test_summary_names_phase_step_rank_location_work_and_directory(tmp_path: Path) -> None:
    lines = summary(stalled(), tmp_path, "there").splitlines()
    assert lines[:2] == ["step 3, phase update", "held up by rank 1: it sleeps"]
    place = "workers/engine/fsdp/fsdp_engine.py:120 in train_step"
    assert lines[2:6] == [
        f"rank 1 (process 101, sleeping) is at {place}; worked on 8 rows",
        f"rank 0 (process 100, sleeping) is at {place}; worked on 7 rows",
        "  its child 200 is stopped: engine",
        "rank 2 (process 102, sleeping) has answered; worked on 9 rows",
    ]
    assert lines[6].startswith("memory: ") and "/dev/shm" in lines[6]
    assert lines[7:] == ["last line of /run/logs/rank_1_workers.log: from 1", "stacks, memory, logs: there"]


def test_report_has_every_file_and_overwrites_none(tmp_path: Path) -> None:
    daemons = tmp_path / "ray/session_latest/logs"
    daemons.mkdir(parents=True)
    (daemons / "raylet.out").write_text("".join(f"line {number}\n" for number in range(50)))
    directory = record(stalled(), tmp_path)
    assert directory == tmp_path / "logs/stall_3_update"
    assert {path.name for path in directory.iterdir()} == {
        "rank_0.txt", "rank_1.txt", "rank_2.txt", "memory.txt", "ray.txt", "summary.txt"
    }  # fmt: skip
    first = (directory / "rank_0.txt").read_text()
    assert "all_reduce" in first and "engine: pipe" in first and "from 0" in first and "7 rows" in first
    memory = (directory / "memory.txt").read_text()
    assert "rank 0: process 200: 2 MB: engine" in memory and "swap" in memory
    daemon = (directory / "ray.txt").read_text()
    assert daemon.startswith("--- raylet.out\nline 30\n") and daemon.endswith("line 49\n")
    assert record(stalled(), tmp_path) == tmp_path / "logs/stall_3_update_2"


def test_report_names_the_controller(tmp_path: Path) -> None:
    stall = Stall(0, "reward", [rank(CONTROLLER, SLEEPS)], ["12 answers"], Verdict([CONTROLLER], ""))
    directory = record(stall, tmp_path)
    assert summary(stall, tmp_path, "there").splitlines()[1].startswith("controller (process 99, sleeping) is at workers/engine")
    assert "12 answers" in (directory / "controller.txt").read_text()
