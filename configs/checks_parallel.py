"""How the GPUs of a role share rows, tokens and parameters; see configs/checks.py. Megatron's own cuts: checks_megatron.py."""

from collections.abc import Iterator, Mapping

from configs.checks_rollout import Workers, workers_in_words, world_size
from configs.schema.common import FSDPConfig, ShardedConfig


def data_parallel_size(role: ShardedConfig, workers: Workers) -> int:
    """The shares that a batch of the role falls into: GPUs by those that work on the same rows. 1 where that does not divide,
    which parallel_problems and megatron_problems tell."""
    together = role.megatron.model_parallel_size if role.strategy == "megatron" else context_parallel_size(role)
    return max(1, world_size(workers) // together)


def context_parallel_size(role: ShardedConfig) -> int:
    """GPUs that the tokens of one micro-batch are spread over."""
    if role.strategy == "megatron":
        return role.megatron.context_parallel_size
    return role.fsdp_config.ulysses_sequence_parallel_size


def context_parallel_key(role: ShardedConfig) -> str:
    """The last part of the key that says so."""
    return "context_parallel_size" if role.strategy == "megatron" else "ulysses_sequence_parallel_size"


def parallel_problems(roles: Mapping[str, ShardedConfig], workers: Workers) -> Iterator[str]:
    """roles: by their key, those on the FSDP engine among them, that are on these workers."""
    total = world_size(workers)
    told: list[FSDPConfig] = []
    for key, role in roles.items():
        if role.strategy != "fsdp" or role.fsdp_config in told:  # others follow the actor
            continue
        told.append(role.fsdp_config)
        size, ranks = role.fsdp_config.fsdp_size, role.fsdp_config.ulysses_sequence_parallel_size
        if size == 0:
            yield f"{key}.fsdp_config.fsdp_size=0: must be -1 (all GPUs share one copy), or so many that do, 1 at least"
        elif size > 0 and total % size:
            yield f"{key}.fsdp_config.fsdp_size={size}: {_does_not_divide(size, workers)}"
        if total % ranks:
            yield f"{key}.fsdp_config.ulysses_sequence_parallel_size={ranks}: {_does_not_divide(ranks, workers)}"


def parallel_notes(roles: Mapping[str, ShardedConfig]) -> Iterator[str]:
    for key, role in roles.items():
        if role.strategy == "megatron" and role.fsdp_config.ulysses_sequence_parallel_size > 1:
            yield (
                f"{key}.fsdp_config.ulysses_sequence_parallel_size has no effect with strategy=megatron; "
                f"{key}.megatron.context_parallel_size cuts rows there"
            )


def _does_not_divide(size: int, workers: Workers) -> str:
    total = world_size(workers)
    return (
        f"does not divide {workers_in_words(workers)} ({total} = {total // size} * {size} + {total % size}); take one that does"
    )
