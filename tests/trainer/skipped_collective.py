"""A rank of two skips a collective, and the watchdog reports it. On two GPUs, without pytest:

python -m tests.trainer.skipped_collective
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from tests.trainer.watchdogs import watchdog
from workers.controller.group import PhaseTimeout, WorkerGroup
from workers.controller.ray.ray_backend import RayBackend
from workers.controller.resource_pool import ResourcePool
from workers.controller.rpc import worker_call
from workers.roles.worker import Worker

LIMIT = 3.0
NUMBER = 3  # of the all_reduce that rank 1 skips
SIZE = 2**22
FOREVER = 300.0


class SkippingWorker(Worker):
    def enter(self, skipping: int = -1) -> None:
        """An all_reduce without the rank ``skipping``. On CUDA the others wait in its kernel."""
        if self.info.rank != skipping:
            dist.all_reduce(torch.ones(SIZE, dtype=torch.bfloat16, device=self.device))
            if self.device == "cuda":
                torch.cuda.synchronize()


def skip(backend: RayBackend, folder: Path, device: Literal["cpu", "cuda"], **limits: float) -> PhaseTimeout:
    """The watchdog's error when rank 1 has returned without the third all_reduce."""
    limits = {"update": FOREVER, "collective": FOREVER} | limits
    env = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "500"}  # its watchdog waits four times as long before it ends the process
    pool = ResourcePool((2,), device, "pool")
    group = backend.start_group(
        f"skip_{'_'.join(limits)}", pool, "tests.trainer.skipped_collective:SkippingWorker", device, limits["collective"], env=env
    )
    try:
        return late(group, folder, limits)
    finally:
        group.shutdown()


def late(group: WorkerGroup, folder: Path, limits: dict[str, float]) -> PhaseTimeout:
    guard = watchdog(folder, **limits)
    for _ in range(NUMBER - 1):
        guard.call(group, "start", "before", worker_call(SkippingWorker.enter))
    try:
        guard.call(group, "update", "the update", worker_call(SkippingWorker.enter, 1))
    except PhaseTimeout as error:
        return error
    raise AssertionError("the collective that rank 1 skipped came to an end")


def at_the_phases_limit(backend: RayBackend, folder: Path, device: Literal["cpu", "cuda"]) -> None:
    message = str(skip(backend, folder, device, update=LIMIT))
    collective = f"all_reduce #{NUMBER} of group default_pg (bfloat16, {SIZE:,} elements)"
    assert f"held up by rank 1: it has not entered {collective}, where rank 0 waits" in message, message
    assert re.search(rf"  in flight: {re.escape(collective)}, \w+; last completed: all_reduce #{NUMBER - 1} ", message), message
    assert f"  no collective in flight; last completed: all_reduce #{NUMBER - 1} " in message, message
    kept: list[dict[str, Any]] = [
        json.loads((folder / f"logs/stall_0_update/rank_{rank}_collectives.json").read_text()) for rank in (0, 1)
    ]
    numbers = [[entry["collective_seq_id"] for dump in one.values() for entry in dump["entries"]] for one in kept]
    assert numbers == [list(range(1, NUMBER + 1 - rank)) for rank in (0, 1)], numbers


def at_the_collectives_limit(backend: RayBackend, folder: Path, device: Literal["cpu", "cuda"]) -> None:
    """gloo raises; NCCL's watchdog aborts the process of the rank that waited, which is not the suspect."""
    message = str(skip(backend, folder, device, collective=LIMIT))
    assert "a collective in the update, limited by timeouts.collective=3, took more than 3 s" in message, message
    assert "held up by rank 1: it has ended its call, and rank 0 waits in a collective" in message, message


SCENARIOS = (at_the_phases_limit, at_the_collectives_limit)


def main(device: Literal["cpu", "cuda"] = "cuda") -> int:
    failed = 0
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        with RayBackend(run_dir=folder, nnodes=1, n_gpus_per_node=2, device=device, ray_init={}) as backend:
            for scenario in SCENARIOS:
                begun = time.monotonic()
                try:
                    scenario(backend, folder, device)
                    message = "passed"
                except Exception as error:  # continue with the next scenario
                    message, failed = f"FAILED: {type(error).__name__}: {error}", failed + 1
                print(f"{scenario.__name__}: {time.monotonic() - begun:.1f} s, torch {torch.__version__}: {message}", flush=True)
        for log in folder.glob("logs/**/*") if failed else ():
            if log.is_file():
                print(f"--- {log.relative_to(folder)}", *log.read_text(errors="replace").splitlines()[-120:], sep="\n")
    return failed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
