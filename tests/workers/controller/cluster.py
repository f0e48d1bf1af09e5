"""A run that joins a Ray cluster of two nodes: python -m tests.workers.controller.cluster RUN_DIR ADDRESS"""

import json
import sys
from dataclasses import asdict

import ray

from tests.workers.controller.toy import Toy
from workers.controller.group import Limit, PhaseTimeout
from workers.controller.ray.ray_backend import RayBackend
from workers.controller.resource_pool import ResourcePool
from workers.controller.rpc import worker_call

TOY = "tests.workers.controller.toy:Toy"
JOIN_SECONDS = 60.0


def main(run_dir: str, address: str) -> None:
    message = {}
    start = {"run_dir": run_dir, "nnodes": 2, "n_gpus_per_node": 2, "device": "cpu", "ray_init": {"address": address}}
    with RayBackend(**start, join_seconds=JOIN_SECONDS) as backend:
        group = backend.start_group("toy", ResourcePool((2, 2), "cpu", "p"), TOY, env={"A": "b"})
        message["infos"] = [asdict(info) for info in group.call(worker_call(Toy.stands)).result()]
        message["raylets"] = [value for (value,) in group.call(worker_call(Toy.environment, "RAY_RAYLET_PID")).result()]
        message["env"] = group.call(worker_call(Toy.environment, "A", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES")).result()
        try:
            group.call(worker_call(Toy.hang, 1, 3), limit=Limit(1.0)).result()
        except PhaseTimeout as late:
            message["hanging"] = ["in hang\n" in state.processes[0].stacks for state in late.states]
    with RayBackend(**start, join_seconds=0.5) as backend:
        room = ResourcePool((2, 2), "cpu", "room")
        for n in (0, 1):
            half = backend.start_group(f"half_{n}", ResourcePool((1, 1), "cpu", f"half {n}", room=room, first_slot=n), TOY)
            raylets = [value for (value,) in half.call(worker_call(Toy.environment, "RAY_RAYLET_PID")).result()]
            infos = half.call(worker_call(Toy.stands)).result()
            message[f"half_{n}"] = [
                (info.node_rank, info.local_rank, raylet) for info, raylet in zip(infos, raylets, strict=True)
            ]
        try:
            backend.start_group("large", ResourcePool((5, 2), "cpu", "large"), TOY)
        except ValueError as error:
            message["too large"] = str(error)
    ray.init(address=address, logging_level="ERROR")
    message["alive"] = sum(node["Alive"] for node in ray.nodes())
    ray.shutdown()
    print(json.dumps(message))


if __name__ == "__main__":
    main(*sys.argv[1:])
