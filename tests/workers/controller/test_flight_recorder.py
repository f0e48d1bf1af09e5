"""Collectives recorded by torch: read from a living process, and compared between ranks."""

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from tests.workers.controller.test_process_inspection import process
from workers.controller.flight_recorder import (
    KEPT_ENTRIES,
    _latest,
    collectives_of,
    enable_collective_reports,
    in_words,
    read_records,
    stragglers,
)
from workers.controller.process_inspection import examine

MEMBERS = {"dp": [0, 1, 2, 3], "tp01": [0, 1], "tp12": [1, 2], "tp20": [2, 0]}
GLOO = """
import torch, torch.distributed as dist
from workers.controller.flight_recorder import enable_collective_reports
enable_collective_reports()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for size in range(1, 31):
    dist.all_reduce(torch.ones(size, 2, dtype=torch.bfloat16))
dist.new_group([0], group_desc="single")
dist.broadcast(torch.ones(3), 0)
def hang():
    print(flush=True)
    time.sleep(600)
hang()
"""


def entry(
    number: int, operation: str = "all_reduce", group: str = "dp", *, state: str = "completed", size: int = 2**22, **changes: Any
) -> dict[str, Any]:
    """An entry of NCCL's dump in torch 2.13. state: "coalesced": a part of a coalesced collective, which has no events."""
    return {
        "record_id": number,
        "pg_id": 0,
        "process_group": [group, group],
        "thread_name": "python",
        "thread_id": "1",
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": f"nccl:{operation}",
        "time_created_ns": 1000 + number,
        "input_sizes": [[size // 4, 4]],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [[size]],
        "output_dtypes": ["BFloat16"],
        "state": "scheduled" if state == "coalesced" else state,
        "time_discovered_started_ns": 0,
        "time_discovered_completed_ns": 0,
        "retired": state == "completed",
        "timeout_ms": 600000,
        "is_p2p": False,
    } | changes


def dump(*entries: dict[str, Any]) -> dict[str, Any]:
    config = {name: {"name": name, "desc": name, "ranks": str(ranks)} for name, ranks in MEMBERS.items()}
    return {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": list(entries)}


def compared(**ranks: list[dict[str, Any]]) -> tuple[list[int], str] | None:
    return stragglers({int(name[1:]): read_records(json.dumps({"nccl": dump(*entries)})) for name, entries in ranks.items()})


def flying(number: int, operation: str = "all_gather", group: str = "dp", **changes: Any) -> dict[str, Any]:
    return entry(number, operation, group, state="scheduled", **changes)


def test_records_of_a_living_process_are_read() -> None:
    with process(GLOO) as pid:
        for _ in range(2):
            ((state,),) = examine([pid])
            assert "in hang\n" in state.stacks
            content = json.loads(state.collectives)
            assert len(content["gloo"]["entries"]) == KEPT_ENTRIES
            records = read_records(state.collectives)
        assert list(in_words(records)) == [
            "no collective in flight; last completed: broadcast #31 of group default_pg (float, 3 elements)"
        ]
        before = content["gloo"]["entries"][-2]
        template = entry(30)
        assert before.keys() == template.keys(), "the tests below use another format"
        assert {name: type(value) for name, value in before.items()} == {name: type(value) for name, value in template.items()}
        assert (before["profiling_name"], before["input_sizes"], before["state"]) == ("gloo:all_reduce", [[30, 2]], "scheduled")


def test_process_without_a_reply_has_no_records(monkeypatch: pytest.MonkeyPatch) -> None:
    assert collectives_of(1) == "" and collectives_of(2**22 + 1) == ""
    with process("print(flush=True); time.sleep(600)") as pid:
        assert collectives_of(pid) == "", "it has no recorder"
    monkeypatch.setattr("workers.controller.flight_recorder.ANSWER_SECONDS", 0.2)
    start = "from workers.controller.flight_recorder import enable_collective_reports as enable\nenable()\nimport ctypes, sys\n"
    holds = "sys.setswitchinterval(600); library = ctypes.PyDLL(None); library.write(1, b'\\n', 1); library.sleep(600)"
    with process(holds, start) as pid:
        assert collectives_of(pid) == "", "an extension holds the interpreter's lock"


def test_process_without_torch_has_no_records_and_keeps_its_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    start = (
        "import os, time\nfrom workers.controller.flight_recorder import enable_collective_reports\nenable_collective_reports()\n"
    )
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE", raising=False)  # workers of this process have set it
    for name, value, found in [("PATH", os.environ["PATH"], "2000"), ("TORCH_NCCL_TRACE_BUFFER_SIZE", "0", "None")]:
        monkeypatch.setenv(name, value)
        code = f"assert str(os.environ.get('TORCH_FR_BUFFER_SIZE')) == '{found}'\nprint(flush=True); time.sleep(600)"
        with process(code, start) as pid:
            assert collectives_of(pid) == "{}"


def test_rank_that_has_not_entered_is_named_with_the_collective() -> None:
    done = [entry(15), entry(16, "broadcast")]
    started = entry(17, "all_gather", state="started")
    found = compared(r0=[*done, flying(17), flying(18)], r1=done, r2=[*done, flying(17)], r3=[*done, started])
    assert found == (
        [1],
        "it has not entered all_gather #17 of group dp (bfloat16, 4,194,304 elements), where ranks 0, 2, 3 wait",
    )
    assert compared(r0=[flying(1)], r1=[], r2=[flying(1)], r3=[flying(1)]) is not None, "a rank without records"
    assert compared(r0=[*done, flying(17)], r2=[*done, flying(17)], r3=[*done, flying(17)]) is None, "rank 1 does not reply"
    assert compared(r0=done, r1=done, r2=done, r3=done) is None
    assert compared(r0=[], r1=[]) is None


def test_suspect_is_the_rank_that_waits_for_no_other() -> None:
    """Rank 0 waits for rank 1, which waits for rank 2, which is working."""
    assert compared(r0=[flying(5, group="tp01")], r1=[flying(9, group="tp12")], r2=[entry(8, group="tp12")]) == (
        [2],
        "it has not entered all_gather #9 of group tp12 (bfloat16, 4,194,304 elements), where rank 1 waits",
    )
    found = compared(r0=[flying(1, group="tp01")], r1=[flying(1, group="tp12")], r2=[flying(1, group="tp20")])
    assert found is not None and found[0] == [0], "the first rank that its collective lacks"


def test_different_operation_or_size_under_the_same_number_is_reported() -> None:
    found = compared(r0=[flying(3)], r1=[flying(3, "reduce_scatter", size=8)], r2=[flying(3)], r3=[flying(3)])
    assert found == (
        [1],
        "not the same collective: ranks 0, 2, 3 wait in all_gather #3 of group dp (bfloat16, 4,194,304 elements), "
        "rank 1 waits in reduce_scatter #3 of group dp (bfloat16, 8 elements)",
    )
    found = compared(r0=[flying(3, "all_reduce")], r1=[flying(3, "all_reduce", size=8)], r2=[], r3=[])
    assert found is not None and found[0] == [2, 3], "ranks that have not entered come first"
    reduces = {f"r{rank}": [flying(3, "all_reduce", size=8 if rank == 2 else 16)] for rank in range(4)}
    assert (found := compared(**reduces)) is not None and found[0] == [2]
    uneven = {f"r{rank}": [flying(3, "all_to_all", size=4 * rank)] for rank in range(4)}
    assert compared(**uneven) is None, "each rank sends a different size"


def test_parts_of_completed_collectives_and_sends_are_not_in_flight() -> None:
    parts = [entry(4, "_all_gather_base", state="coalesced"), entry(4, "coalesced")]
    records = read_records(json.dumps({"nccl": dump(*parts, flying(5, "send 0->1", is_p2p=True, p2p_seq_id=1))}))
    ((name, group),) = records.items()
    assert name == ("nccl", "dp") and group.in_flight is None and group.entered == 4 and group.members == (0, 1, 2, 3)


def test_gloo_retires_completed_entries_and_has_no_members() -> None:
    over = entry(1, profiling_name="gloo:all_reduce", state="scheduled", retired=True)
    waits = entry(2, profiling_name="gloo:all_reduce", state="scheduled", retired=False)
    ranks = [{"gloo": dump(*entries) | {"pg_config": {"": {"ranks": "[0, 1]"}}}} for entries in ([over, waits], [over])]
    found = stragglers({rank: read_records(json.dumps(content)) for rank, content in enumerate(ranks)})
    assert found is not None and found[0] == [1] and "all_reduce #2 of group dp" in found[1]
    nccl = entry(1, state="scheduled", retired=True)
    assert read_records(json.dumps({"nccl": dump(nccl)}))["nccl", "dp"].in_flight is not None, "timed out, and not completed"


def test_dump_has_the_last_entries_of_each_group_and_all_in_flight() -> None:
    entries = [flying(0, group="tp01"), *(entry(number, group=group) for number in range(1, 100) for group in ("dp", "tp01"))]
    kept = _latest(entries)
    assert kept[0] == entries[0] and len(kept) == 1 + 2 * KEPT_ENTRIES and kept[1:] == entries[-2 * KEPT_ENTRIES :]


@pytest.mark.parametrize(
    ("code", "stderr", "found"),
    [
        (0, "", "Thread 7 (idle)"),
        (1, "Permission Denied: Try again", "py-spy may not attach: ptrace is not allowed here"),
        (1, "Error: EPERM: Operation not permitted", "py-spy may not attach: ptrace is not allowed here"),
        (1, "Error: Failed to find python version\n\nStack backtrace:\n 0: x", "py-spy: Error: Failed to find python version"),
    ],
)
def test_py_spy_is_used_if_a_process_does_not_reply(
    code: int, stderr: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for the program, which may not attach to processes where tests run."""
    program = tmp_path / "py-spy"
    program.write_text(f"#!/bin/sh\necho \"$@\" > {tmp_path}/asked\nprintf '{stderr}' >&2\necho 'Thread 7 (idle)'\nexit {code}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with process("import time; print(flush=True); time.sleep(600)", "") as pid:
        ((state,),) = examine([pid])
    assert state.stacks == "" and state.native.startswith(found) and "\n 0" not in state.native
    assert (tmp_path / "asked").read_text() == f"dump --native --pid {pid}\n"


def test_thread_is_started_once_and_replies_with_current_records(monkeypatch: pytest.MonkeyPatch) -> None:
    enable_collective_reports()
    enable_collective_reports()
    links = [os.readlink(one) for one in Path("/proc/self/fd").iterdir() if os.path.lexists(one)]
    assert sum("tandem-collectives" in link for link in links) == 1
    for now in ({"gloo": 1}, {"gloo": 2}):
        monkeypatch.setattr("workers.controller.flight_recorder.recorded", lambda now=now: now)
        assert json.loads(collectives_of(os.getpid())) == now
