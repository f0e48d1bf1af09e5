"""The worker groups that a placement starts."""

from collections.abc import Mapping
from typing import Any, cast

from configs.compose import compose
from configs.schema.placement import ROLES, place
from configs.schema.ppo import PPOConfig
from trainer.cluster.launch import start_pools
from workers.controller.group import Backend, Transport, WorkerGroup
from workers.controller.resource_pool import ResourcePool


class RecordingBackend(Backend):
    """Records the requested groups."""

    def __init__(self) -> None:
        self.pools: dict[str, ResourcePool] = {}
        self.fractions: dict[str, float] = {}

    def start_group(
        self,
        name: str,
        pool: ResourcePool,
        worker: str | type,
        /,
        *args: Any,
        env: Mapping[str, str] | None = None,
        memory_fraction: float = 1.0,
        **kwargs: Any,
    ) -> WorkerGroup:
        self.pools[name] = pool
        self.fractions[name] = memory_fraction
        return WorkerGroup(name, pool.world_size, cast(Transport, None))

    def shutdown(self) -> None:
        pass


def started(*overrides: str) -> tuple[RecordingBackend, dict[str, WorkerGroup]]:
    config = compose("ppo_trainer", PPOConfig, overrides)
    backend, pools = RecordingBackend(), place(config.placement, config.trainer, ("actor", "ref", "critic", "rollout"))
    return backend, start_pools(backend, config.trainer, pools, config.timeouts, engine="embedded")


def test_single_pool_has_all_workers() -> None:
    backend, workers = started("trainer.nnodes=2")
    assert backend.pools == {"workers": ResourcePool((8, 8), "cuda", "workers")}
    assert workers.keys() == set(ROLES) and len({id(group) for group in workers.values()}) == 1


def test_pools_share_one_reservation_of_gpus() -> None:
    """Each pool is at its place with its part of the memory; a role has the group of its pool."""
    backend, workers = started(
        "placement=custom", "placement.roles.actor=train", "placement.roles.critic=value", "placement.roles.rollout=engines",
        "placement.pools={train: {nodes: 2, gpus: 4, fraction: 1}, value: {nodes: 1, gpus: 2, fraction: 0.25}, "
        "engines: {nodes: 1, gpus: 2, fraction: 0.75}}", "trainer.nnodes=2", "trainer.n_gpus_per_node=6",
    )  # fmt: skip
    room = ResourcePool((6, 6), "cuda", "workers")
    assert backend.pools == {
        "train": ResourcePool((4, 4), "cuda", "train", room=room),
        "value": ResourcePool((2,), "cuda", "value", room=room, first_slot=4),
        "engines": ResourcePool((2,), "cuda", "engines", room=room, first_slot=4),
    }
    assert backend.fractions == {"train": 1.0, "value": 0.25, "engines": 0.75}
    names = {role: group.name for role, group in workers.items()}
    assert names == {"actor": "train", "ref": "train", "critic": "value", "reward": "train", "rollout": "engines"}


def test_single_smaller_pool_reserves_only_its_own_gpus() -> None:
    backend, _ = started("placement=custom", "placement.roles.actor=a", "placement.pools.a={nodes: 1, gpus: 3, fraction: 1}")
    assert [pool.world_size for pool in backend.pools.values()] == [3]
