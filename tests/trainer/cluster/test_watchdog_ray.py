"""Faults of real ranks in an update: each ends in time, and the right rank is named. One worker group for all faults."""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiny import save_tiny_model
from tests.trainer.faults import COLLECTIVE, FAULT, FaultyWorker
from tests.trainer.watchdogs import watchdog
from tests.workers.engine.toy import toy_batch
from tests.workers.rollout.engines import spec_of
from tests.workers.rollout.vllm_workers import actor_spec
from trainer.cluster.oom_backoff import Budget
from trainer.cluster.remote import RemoteModel
from workers.controller.group import PhaseTimeout, WorkerError
from workers.controller.ray.ray_backend import RayBackend
from workers.controller.resource_pool import ResourcePool
from workers.controller.rpc import worker_call
from workers.engine.base import LossSpec
from workers.plan import Limits

LIMIT = 2.5
SLACK = 8.0  # seconds from the limit to a clear end, on a busy machine


class Run:
    def __init__(self, backend: RayBackend, folder: Path) -> None:
        self.folder = folder
        self.group = backend.start_group(
            "workers", ResourcePool((2,), "cpu", "pool"), "tests.trainer.faults:FaultyWorker", "cpu", 300.0
        )
        spec = actor_spec(spec_of(save_tiny_model(folder / "model")).model)
        loss, limits = LossSpec("tests.trainer.faults:FaultyLoss", None), Limits(max_tokens=32)
        self.actor = RemoteModel(
            self.group, "actor", spec, loss, forward_limits=limits, train_limits=limits, attention_cost=0.0,
            budget=Budget("actor"), watchdog=watchdog(folder),
        )  # fmt: skip

    def update(self, fault: str, limit: float, step: int = 0) -> None:
        self.actor.watchdog = watchdog(self.folder, update=limit)
        self.actor.watchdog.step = step
        self.actor.train_step(
            toy_batch([9, 5, 12, 7]).with_meta({FAULT: fault, "temperature": 1.0}), ["advantages", "old_log_probs"]
        )

    def late(self, fault: str, step: int) -> PhaseTimeout:
        """After a successful update: the previous fault has ended by then."""
        self.update("none", 60.0)
        begun = time.monotonic()
        with pytest.raises(PhaseTimeout) as raised:
            self.update(fault, LIMIT, step)
        assert time.monotonic() - begun < LIMIT + SLACK
        return raised.value


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("run")
    with RayBackend(run_dir=folder, nnodes=1, n_gpus_per_node=2, device="cpu", ray_init={}) as backend:
        yield Run(backend, folder)


def test_sleeping_rank_is_named(run: Run) -> None:
    late = run.late("sleeps", 3)
    first, second, blamed, *lines = str(late).splitlines()
    assert (
        first == f"update of actor, limited by timeouts.update={LIMIT:g}, took more than {LIMIT:g} s: no answer from ranks [0, 1]"
    )
    assert second == "step 3, phase update"
    collective = r"all_gather #\d+ of group default_pg \(float, [\d,]+ elements in, [\d,]+ out\)"
    assert re.fullmatch(f"held up by rank 1: it has not entered {collective}, where rank 0 waits", blamed)
    assert (
        lines[0].startswith("rank 1 (process ")
        and "tests/trainer/faults.py:" in lines[0]
        and "in __call__; worked on 2 rows" in lines[0]
    )
    assert lines[1].startswith("  no collective in flight; last completed: ")
    assert lines[2].startswith("rank 0 (process ") and "workers/engine/fsdp/fsdp_engine.py:" in lines[2]
    assert re.fullmatch(rf"  in flight: {collective}, scheduled; last completed: .*", lines[3])
    assert len(lines) < 8 and lines[-1] == f"stacks, memory, logs: {run.folder}/logs/stall_3_update"
    kept = run.folder / "logs/stall_3_update"
    assert "distributed_c10d.py" in (kept / "rank_0.txt").read_text() and "in __call__" in (kept / "rank_1.txt").read_text()
    assert "--- raylet" in (kept / "ray.txt").read_text()


def test_stopped_rank_is_named(run: Run) -> None:
    late = run.late("SIGSTOP", 4)
    os.kill(late.states[1].processes[0].pid, signal.SIGCONT)
    assert "held up by rank 1: a process of it is stopped" in str(late)
    assert ", stopped) does not say where it is; worked on 2 rows" in str(late)


@pytest.mark.parametrize("limit", [1.0, 60.0], ids=["the phase's limit", "the collective's limit"])
def test_rank_that_skips_a_collective_is_named(run: Run, limit: float) -> None:
    """Whichever limit is exceeded first. The second call waits until the first has ended."""
    limits = watchdog(run.folder, update=limit, collective=COLLECTIVE)
    with pytest.raises(PhaseTimeout) as raised:
        limits.call(run.group, "update", "lonely", worker_call(FaultyWorker.enter_alone))
    first = str(raised.value).splitlines()[0]
    if limit < COLLECTIVE:
        assert first == "lonely, limited by timeouts.update=1, took more than 1 s: no answer from ranks [0]"
    else:
        assert first == "a collective in lonely, limited by timeouts.collective=4, took more than 4 s: no answer from ranks [1]"
    assert "held up by rank 1: it has ended its call, and rank 0 waits in a collective" in str(raised.value)


def test_rank_that_dies_while_others_wait_is_named(run: Run) -> None:
    """The others notice it first, in a collective."""
    begun = time.monotonic()
    with pytest.raises(WorkerError, match=r"rank 1 failed in update of actor: process \d+ died: killed by a signal"):
        run.update("SIGKILL", 60.0)
    assert time.monotonic() - begun < SLACK
