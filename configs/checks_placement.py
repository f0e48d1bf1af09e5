"""Placements that cannot work, and what a pool means for the roles in it; see configs/checks.py and configs/pools.py."""

from collections.abc import Iterator, Mapping

from configs.checks_batches import name_of, roles_of
from configs.checks_megatron import megatron_problems
from configs.checks_parallel import parallel_problems
from configs.checks_rollout import ROLLOUT
from configs.pools import Placement, place
from configs.schema.common import ShardedConfig
from configs.schema.placement import PlacementConfig
from configs.schema.ppo import PPOConfig


def placement_of(config: PPOConfig, *, has_critic: bool) -> Placement:
    """Raises ConfigError, in one line, if there is no room for it."""
    models = {name_of(key) for key in roles_of(config, has_critic=has_critic)}
    return place(config.placement, config.trainer, models | {"rollout"})


def placement_problems(config: PPOConfig, place: Placement) -> Iterator[str]:
    if config.trainer.backend == "local" and len(place.pools) > 1:
        names = ", ".join(pool.name for pool in place.pools)
        yield f"trainer.backend=local: runs one worker, in this process; pools {names} have processes of their own (backend=ray)"
    rollout, engines = config.actor_rollout_ref.rollout, place.pool("rollout")
    if engines.fraction == 1:
        return
    key = f"placement.pools.{engines.name}.fraction={engines.fraction:g}"
    if rollout.free_cache_engine and "actor" in engines.roles:  # apart from the actor it does not sleep
        yield (
            f"{key}: memory on a shared GPU is reserved once, and the rollout engine in this pool would sleep and wake; set "
            f"{ROLLOUT}.free_cache_engine=false"
        )
    if rollout.name != "embedded" and rollout.gpu_memory_utilization > engines.fraction:
        yield (
            f"{key}: {ROLLOUT}.gpu_memory_utilization={rollout.gpu_memory_utilization:g} is the engine's share of the whole GPU, "
            f"and more than the pool's"
        )


def pool_problems(roles: Mapping[str, ShardedConfig], place: Placement) -> Iterator[str]:
    """roles: by their key, those with a training engine. Only those that share GPUs have to agree."""
    for pool in place.pools:
        here = {key: role for key, role in roles.items() if name_of(key) in pool.roles}
        yield from parallel_problems(here, pool)
        yield from megatron_problems(here, pool)


def placement_notes(config: PlacementConfig, place: Placement) -> Iterator[str]:
    if config.layout != "colocate_all":
        yield f"placement.layout={config.layout}: {'; '.join(pool.in_words() for pool in place.pools)}"
