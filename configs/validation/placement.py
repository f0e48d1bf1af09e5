"""Validate placements, and roles against the pools they run in; see programs.py and configs/schema/placement.py."""

from collections.abc import Iterator, Mapping

from configs.schema.common import ShardedConfig
from configs.schema.placement import Placement, PlacementConfig, place
from configs.schema.ppo import PPOConfig
from configs.validation.batches import name_of, roles_of
from configs.validation.megatron import megatron_problems
from configs.validation.parallel import parallel_problems
from configs.validation.rollout import ROLLOUT


def placement_of(config: PPOConfig, *, has_critic: bool) -> Placement:
    """Placement of the run's roles. Raises ConfigError with one line if the pools do not fit."""
    # The rollout engine always exists; the other roles depend on the configuration.
    models = {name_of(key) for key in roles_of(config, has_critic=has_critic)}
    return place(config.placement, config.trainer, models | {"rollout"})


def placement_problems(config: PPOConfig, place: Placement) -> Iterator[str]:
    """Problems of a placement with the backend, and of GPUs shared by fractions."""
    if config.trainer.backend == "local" and len(place.pools) > 1:
        names = ", ".join(pool.name for pool in place.pools)
        yield (
            f"trainer.backend=local: runs a single worker in this process, but pools {names} need separate processes; use "
            "trainer.backend=ray"
        )
    rollout, engines = config.actor_rollout_ref.rollout, place.pool("rollout")
    if engines.fraction == 1:
        return
    key = f"placement.pools.{engines.name}.fraction={engines.fraction:g}"
    actor = place.pool("actor")
    if config.trainer.device == "cuda" and engines is not actor and actor.slots[0] in engines.slots:
        yield (
            f"{key}: weights come from the first GPU of pool {actor.name}, which this pool shares, and NCCL does not connect two "
            "processes on a GPU; put the roles rollout and actor into one pool, or move this one"
        )
    # Only an engine in the actor's processes sleeps during training; on a shared GPU its memory could not be reclaimed safely.
    if rollout.free_cache_engine and "actor" in engines.roles:
        yield (
            f"{key}: memory of a shared GPU is reserved once, but the rollout engine in this pool would sleep and wake; set "
            f"{ROLLOUT}.free_cache_engine=false"
        )
    if rollout.name != "embedded" and rollout.gpu_memory_utilization > engines.fraction:
        yield (
            f"{key}: {ROLLOUT}.gpu_memory_utilization={rollout.gpu_memory_utilization:g} is a fraction of the whole GPU "
            f"and must not exceed the pool's"
        )


def pool_problems(roles: Mapping[str, ShardedConfig], place: Placement) -> Iterator[str]:
    """Problems of roles within their pools. roles: {key: role with a training engine}; only roles that share GPUs must agree."""
    for pool in place.pools:
        here = {key: role for key, role in roles.items() if name_of(key) in pool.roles}
        yield from parallel_problems(here, pool)
        yield from megatron_problems(here, pool)


def placement_notes(config: PlacementConfig, place: Placement) -> Iterator[str]:
    """The pools of a run, unless all roles share all GPUs."""
    if config.layout != "colocate_all":
        yield f"placement.layout={config.layout}: {'; '.join(pool.in_words() for pool in place.pools)}"
