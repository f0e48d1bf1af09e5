"""Data-parallel and context-parallel sizes of roles, and validation of FSDP's; see configs/validation/programs.py.

Megatron's sizes are validated in configs/validation/megatron.py.
"""

from collections.abc import Iterator, Mapping

from configs.schema.common import FSDPConfig, ShardedConfig
from configs.validation.rollout import Workers, workers_in_words, world_size


def data_parallel_size(role: ShardedConfig, workers: Workers) -> int:
    """Data-parallel size of a role: its GPUs divided by the GPUs that work on the same rows.

    At least 1; sizes that do not divide the number of GPUs are reported by parallel_problems and megatron_problems.
    """
    group = role.megatron.model_parallel_size if role.strategy == "megatron" else context_parallel_size(role)
    return max(1, world_size(workers) // group)


def context_parallel_size(role: ShardedConfig) -> int:
    """GPUs that split the tokens of one micro-batch."""
    if role.strategy == "megatron":
        return role.megatron.context_parallel_size
    return role.fsdp_config.ulysses_sequence_parallel_size


def context_parallel_key(role: ShardedConfig) -> str:
    """Last part of the key that sets the context-parallel size."""
    return "context_parallel_size" if role.strategy == "megatron" else "ulysses_sequence_parallel_size"


def parallel_problems(roles: Mapping[str, ShardedConfig], workers: Workers) -> Iterator[str]:
    """Problems of the FSDP roles among ``roles`` ({key: role}), which run on these workers."""
    total = world_size(workers)
    # The other roles follow the actor by default: check equal configurations once.
    checked: list[FSDPConfig] = []
    for key, role in roles.items():
        if role.strategy != "fsdp" or role.fsdp_config in checked:
            continue
        checked.append(role.fsdp_config)
        size, ranks = role.fsdp_config.fsdp_size, role.fsdp_config.ulysses_sequence_parallel_size
        if size == 0:
            yield f"{key}.fsdp_config.fsdp_size=0: must be -1 (all GPUs share one copy) or at least 1"
        elif size > 0 and total % size:
            yield f"{key}.fsdp_config.fsdp_size={size}: {_does_not_divide(size, workers)}"
        if total % ranks:
            yield f"{key}.fsdp_config.ulysses_sequence_parallel_size={ranks}: {_does_not_divide(ranks, workers)}"


def parallel_notes(roles: Mapping[str, ShardedConfig]) -> Iterator[str]:
    """Warnings about FSDP sizes of Megatron roles."""
    for key, role in roles.items():
        if role.strategy == "megatron" and role.fsdp_config.ulysses_sequence_parallel_size > 1:
            yield (
                f"{key}.fsdp_config.ulysses_sequence_parallel_size has no effect with strategy=megatron; "
                f"use {key}.megatron.context_parallel_size"
            )


def _does_not_divide(size: int, workers: Workers) -> str:
    total = world_size(workers)
    return f"does not divide {workers_in_words(workers)} ({total} = {total // size} * {size} + {total % size}); use a divisor"
