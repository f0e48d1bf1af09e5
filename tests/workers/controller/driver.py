"""A run that ends in the requested way: python -m tests.workers.controller.driver RUN_DIR WAY"""

import sys

from tests.workers.controller.toy import Toy
from workers.controller.ray.ray_backend import RayBackend
from workers.controller.resource_pool import ResourcePool
from workers.controller.rpc import worker_call
from workers.controller.stop import graceful_stop


def main(run_dir: str, way: str) -> None:
    with graceful_stop(), RayBackend(run_dir=run_dir, nnodes=1, n_gpus_per_node=2, device="cpu", ray_init={}) as backend:
        group = backend.start_group("toy", ResourcePool((2,), "cpu", "p"), "tests.workers.controller.toy:Toy")
        group.call(worker_call(Toy.orphan)).result()
        group.call(worker_call(Toy.stands)).result()
        print("ready", flush=True)
        if way == "returns":
            return
        if way == "raises":
            raise RuntimeError("the run failed")
        hanging = worker_call(Toy.hang_with_lock) if way in ("SIGTERM", "SIGKILL") else worker_call(Toy.hang)
        group.call(hanging).result()


if __name__ == "__main__":
    main(*sys.argv[1:])
