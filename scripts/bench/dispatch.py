"""What the controller layer costs: start-up, a call, and large batches, as JSON (milliseconds; medians, and the best).

    python scripts/bench/dispatch.py --workers 2 --megabytes 100

Beside the batch stand Ray's own round trips of the same bytes: as numpy arrays, and as torch tensors.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import ray
import torch

from workers.batch import Batch
from workers.controller.group import WorkerInfo
from workers.controller.ray_backend import RayBackend
from workers.controller.resource_pool import ResourcePool


class Echo:
    def __init__(self, info: WorkerInfo) -> None:
        self.info = info

    def close(self) -> None:
        """Nothing to leave."""

    def same(self, value: Any) -> Any:
        return value if self.info.rank == 0 else None


def milliseconds(work: Callable[[], object], rounds: int) -> dict[str, float]:
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        times.append((time.perf_counter() - started) * 1e3)
    return {"median": round(statistics.median(times), 2), "best": round(min(times), 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokens = args.megabytes * 2**20 // 32
    columns = {name: torch.arange(tokens) for name in ("input_ids", "response_mask")}
    columns |= {name: torch.rand(tokens) for name in ("log_probs", "values", "advantages", "returns")}
    batch = Batch(lengths=torch.tensor([tokens]), tokens=columns)
    arrays = [column.numpy() for column in columns.values()]
    said: dict[str, object] = {"workers": args.workers, "megabytes": args.megabytes}
    with tempfile.TemporaryDirectory() as run_dir:
        started = time.perf_counter()
        with RayBackend(run_dir=run_dir, nnodes=1, n_gpus_per_node=args.workers, device="cpu", ray_init={}) as backend:
            said["start_ray"] = round((time.perf_counter() - started) * 1e3)
            group = backend.start_group("bench", ResourcePool((args.workers,), "cpu", "bench"), Echo)
            group.call("same", None).result()
            said["start_ray_and_workers"] = round((time.perf_counter() - started) * 1e3)
            plain = ray.remote(lambda value: value).options(num_cpus=0)
            said["call"] = milliseconds(lambda: group.call("same", None).result(), 300)
            said["batch_round_trip"] = milliseconds(lambda: group.call("same", batch).result(), args.rounds)
            said["numpy_round_trip"] = milliseconds(lambda: ray.get(plain.remote(arrays)), args.rounds)
            said["numpy_put_and_get"] = milliseconds(lambda: ray.get(ray.put(arrays)), args.rounds)
            said["torch_round_trip"] = milliseconds(lambda: ray.get(plain.remote(batch)), args.rounds)
            started = time.perf_counter()
        said["stop"] = round((time.perf_counter() - started) * 1e3)
    print(json.dumps(said, indent=1))


if __name__ == "__main__":
    main()
