"""A Ray cluster of two nodes on this machine, and a run that joins it: python -m tests.workers.controller.cluster RUN_DIR"""

import json
import sys
from dataclasses import asdict

import ray
from ray.cluster_utils import Cluster

from workers.controller.group import PhaseTimeout
from workers.controller.ray_backend import RayBackend
from workers.controller.ray_places import SLOT
from workers.controller.resource_pool import ResourcePool

NODE = {"num_cpus": 1, "resources": {SLOT: 4}, "object_store_memory": 80 * 2**20}


def main(run_dir: str) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    cluster.add_node(**NODE)
    said = {}
    with RayBackend(run_dir=run_dir, nnodes=2, n_gpus_per_node=2, device="cpu", ray_init={"address": cluster.address}) as backend:
        try:
            backend.start_group("large", ResourcePool((5, 2), "cpu", "large"), "tests.workers.controller.toy:Toy")
        except ValueError as error:
            said["too large"] = str(error)
        group = backend.start_group("toy", ResourcePool((2, 2), "cpu", "p"), "tests.workers.controller.toy:Toy", env={"A": "b"})
        said["infos"] = [asdict(info) for info in group.call("stands").result()]
        said["raylets"] = [value for (value,) in group.call("environment", "RAY_RAYLET_PID").result()]
        said["env"] = group.call("environment", "A", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES").result()
        try:
            group.call("hang", 1, 3, timeout=1.0).result()
        except PhaseTimeout as late:
            said["hanging"] = ["in hang\n" in state.processes[0].stacks for state in late.states]
    ray.init(address=cluster.address, logging_level="ERROR")
    said["alive"] = sum(node["Alive"] for node in ray.nodes())
    ray.shutdown()
    cluster.shutdown()
    print(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
