"""SGLang with FSDP2 shards on two ranks, on Ray: one engine over both, and an engine on each. And what dies with what."""

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.conftest import descendants
from tests.trainer.watchdogs import watchdog
from tests.workers.rollout.ranks import Run, start_workers
from tests.workers.rollout.vllm_workers import CPU_BUILD
from workers.controller.group import PhaseTimeout, WorkerError
from workers.controller.ray.ray_backend import RayBackend

pytestmark = [CPU_BUILD, pytest.mark.soak]  # a start of SGLang on two ranks takes a minute


ENGINES = [pytest.param(2, id="one engine over two ranks"), pytest.param(1, id="two engines")]


@pytest.fixture(scope="module", params=ENGINES)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("run")
    with RayBackend(run_dir=folder, nnodes=1, n_gpus_per_node=2, device="cpu", ray_init={}) as backend:
        yield Run(start_workers(backend), folder / "model", "sglang", request.param, verify_weights="full")


def words(process: psutil.Process) -> str:
    """Of its command; none if it has ended."""
    with suppress(psutil.NoSuchProcess):  # a zombie is one too
        return " ".join(process.cmdline())
    return ""


def processes(what: str) -> list[psutil.Process]:
    return sorted((process for process in descendants() if what in words(process)), key=lambda process: process.pid)


def test_three_rounds_of_training_sleep_and_sync(run: Run, tmp_path: Path) -> None:
    run.check_rounds(tmp_path)


def test_a_number_that_is_off_is_found(run: Run) -> None:
    name = "model.layers.1.self_attn.v_proj.weight"
    message = run.sync_spoiled(name, -1)
    line = f"{name} in sglang on rank {{}} is not the trainer's, weights of version 7: 1 of "
    assert [text.startswith(line.format(rank)) for rank, text in enumerate(message)] == [True, run.size == 1], message


def test_the_mesh_is_the_rollouts_own(run: Run) -> None:
    run.check_mesh()


def test_processes_of_a_replica(run: Run) -> None:
    """One engine, and one process for each of its ranks."""
    assert len(processes("workers.rollout.sglang.sglang_server")) == 2 // run.size
    assert len(processes("sglang::scheduler")) == 2


def test_an_engine_process_that_is_stopped_is_named_with_its_rank(run: Run) -> None:
    run.rollout.sync_weights(8)
    patient, run.rollout.watchdog = run.rollout.watchdog, watchdog(run.path, generate=3.0)
    victim = processes("sglang::scheduler")[-1]
    victim.suspend()
    message = rf"held up by rank \d: a process of it is stopped(.|\n)*its child {victim.pid} is stopped: sglang::scheduler"
    with pytest.raises(PhaseTimeout, match=message) as raised:
        run.answers(greedy=True)
    reported = "\n".join(process.stacks for state in raised.value.states for process in state.processes[1:])
    assert "in serve\n" in reported and "in run_scheduler\n" in reported, "its other processes say where they are"
    victim.resume()
    run.rollout.watchdog = patient


def test_an_engine_that_dies_is_named_and_a_worker_takes_its_engine_along(run: Run) -> None:
    """Ends the run: the last test."""
    run.rollout.sync_weights(9)
    victim = processes("sglang::scheduler")[-1]
    victim.kill()
    with pytest.raises(WorkerError, match=rf"SGLang died in \w+: (.|\n)*it wrote last:(.|\n)*process {victim.pid} ended with -9"):
        run.answers(greedy=True)
    left = processes("sglang")
    assert len(left) == {1: 2, 2: 0}[run.size], "the processes of that engine have ended, those of another have not"
    for process in left:
        if "sglang_server" in words(process):
            process.suspend()  # as one that is busy: it does not notice that its parent is gone
            psutil.Process(process.ppid()).kill()
    deadline = time.monotonic() + 10
    while processes("sglang") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes("sglang") == []
