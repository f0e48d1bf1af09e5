"""Megatron's process groups. They are global to a process, so all its models are split in the same way."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from configs.schema.common import MegatronConfig
from workers.engine.base import EngineMesh

_joined: tuple[dist.ProcessGroup, dict[str, int | None]] | None = None  # group of all ranks, and the parallel sizes


def sizes_of(config: MegatronConfig) -> dict[str, int | None]:
    """Parallel sizes under the names of megatron-core."""
    return {
        "tensor_model_parallel_size": config.tensor_model_parallel_size,
        "pipeline_model_parallel_size": config.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": config.virtual_pipeline_model_parallel_size,
        "context_parallel_size": config.context_parallel_size,
    }


def join(config: MegatronConfig, seed: int) -> EngineMesh:
    """Create the process groups at the first call and return this rank's position. The first call is collective.

    Raises ValueError if another model of this process has other parallel sizes.
    """
    global _joined
    world, wanted = dist.group.WORLD, sizes_of(config)
    assert world is not None, "torch.distributed is not initialised"
    if _joined is not None and _joined[0] is not world:  # left from a process group that no longer exists
        parallel_state.destroy_model_parallel()
        _joined = None
    if _joined is None:
        if world.size() % config.model_parallel_size:
            raise ValueError(f"megatron: {world.size()} ranks do not fall into models of {config.model_parallel_size}")
        parallel_state.initialize_model_parallel(**wanted)
        _joined = world, wanted
        # Without CUDA this seeds torch's CPU random state (see cpu.py), which the fork restores.
        with torch.random.fork_rng(devices=[]):
            model_parallel_cuda_manual_seed(seed % 2**31)
    elif wanted != _joined[1]:
        raise ValueError(f"models that share GPUs are cut alike by Megatron: one has {_joined[1]}, another {wanted}")
    return EngineMesh(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        is_output_rank=parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_context_parallel_rank() == 0
        and parallel_state.is_pipeline_last_stage(ignore_virtual=True),
    )
