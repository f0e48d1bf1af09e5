"""Which processes a placement becomes."""

from collections.abc import Mapping
from typing import Any, cast

from configs.compose import compose
from configs.pools import ROLES, place
from configs.schema.ppo import PPOConfig
from trainer.cluster.launch import start_pools
from workers.controller.group import Backend, Transport, WorkerGroup
from workers.controller.resource_pool import ResourcePool


class Asked(Backend):
    """Keeps what it is asked for."""

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


def started(*overrides: str) -> tuple[Asked, dict[str, WorkerGroup]]:
    config = compose("ppo_trainer", PPOConfig, overrides)
    backend, pools = Asked(), place(config.placement, config.trainer, ("actor", "ref", "critic", "rollout"))
    return backend, start_pools(backend, config.trainer, pools, config.timeouts, engine="embedded")


def test_one_pool_is_all_workers_as_ever() -> None:
    backend, workers = started("trainer.nnodes=2")
    assert backend.pools == {"workers": ResourcePool((8, 8), "cuda", "workers")}
    assert workers.keys() == set(ROLES) and len({id(group) for group in workers.values()}) == 1


def test_pools_are_parts_of_a_room() -> None:
    """Each stands where the placement has it, with its part of the memory; a role has the group of its pool."""
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


def test_a_pool_that_is_not_all_of_the_gpus_is_no_more_than_it_says() -> None:
    backend, _ = started("placement=custom", "placement.roles.actor=a", "placement.pools.a={nodes: 1, gpus: 3, fraction: 1}")
    assert [pool.world_size for pool in backend.pools.values()] == [3]
