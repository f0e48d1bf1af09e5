"""python -m scripts.bench.launch OVERRIDES ...: trainer.main_ppo as step.py runs it.

Each worker writes its number of intra-op threads to threads_<rank> in the folder BENCH_TASK. If the folder has lengths.json, the
r-th request to the rollout engine of the only worker gets the r-th number of that list as its max_tokens, on any engine.

With BENCH_MEMORY each worker also writes to memory_<rank>_<process> how much memory it has before it has a model, and at most.
"""

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from trainer.main_ppo import main
from workers.controller.group import WorkerGroup, WorkerInfo
from workers.controller.local_backend import LocalBackend
from workers.controller.ray.ray_backend import RayBackend
from workers.roles.worker import Worker
from workers.rollout.base import Request


class BenchWorker(Worker):
    def __init__(self, info: WorkerInfo, *args: Any, **kwargs: Any) -> None:
        super().__init__(info, *args, **kwargs)
        if "BENCH_MEMORY" in os.environ:
            file = Path(os.environ["BENCH_TASK"]) / f"memory_{info.rank}_{os.getpid()}"
            Thread(target=weigh, args=(self, file), daemon=True).start()

    def _add_rollout(self, role: str, *args: Any, **kwargs: Any) -> tuple[int, bool]:
        place = super()._add_rollout(role, *args, **kwargs)
        task, rollout = Path(os.environ["BENCH_TASK"]), self.roles[role].rollout
        (task / f"threads_{self.info.rank}").write_text(str(torch.get_num_threads()))
        if (task / "lengths.json").exists():
            assert self.info.world_size == 1
            rollout.submit = partial(submit, rollout.submit, iter(json.loads((task / "lengths.json").read_text())))
        return place


def anonymous() -> int:
    """Resident bytes of this process without files, such as libraries and mapped weights."""
    (line,) = (text for text in Path("/proc/self/status").read_text().splitlines() if text.startswith("RssAnon:"))
    return 1024 * int(line.split()[1])


def weigh(worker: Worker, file: Path) -> None:
    """Write the bytes of ``worker`` before it has a model, their peak, and its roles to ``file`` whenever the peak has grown."""
    before = written = anonymous()
    while True:
        if (now := anonymous()) > written:
            file.write_text(json.dumps({"before": before, "peak": now, "roles": sorted(worker.roles)}))
            written = now
        time.sleep(0.002)


def submit(engine: Any, lengths: Iterator[int], requests: Sequence[Request]) -> None:
    engine([replace(request, sampling=replace(request.sampling, max_tokens=next(lengths))) for request in requests])


def use_bench_worker(backend: type[LocalBackend] | type[RayBackend]) -> None:
    """Make the backend start BenchWorker in place of Worker."""
    start_group = backend.start_group

    def start(self: Any, name: str, pool: Any, worker: str, /, *args: Any, **kwargs: Any) -> WorkerGroup:
        assert worker == "workers.roles.worker:Worker"
        return start_group(self, name, pool, "scripts.bench.launch:BenchWorker", *args, **kwargs)

    backend.start_group = start


if __name__ == "__main__":
    use_bench_worker(LocalBackend)
    use_bench_worker(RayBackend)
    main()
