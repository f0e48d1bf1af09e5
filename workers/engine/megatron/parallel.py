"""Megatron's process groups. They are global to a process, so all models in it are cut alike."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from configs.schema.common import MegatronConfig
from workers.engine.base import EngineMesh


def cut_of(config: MegatronConfig) -> dict[str, int | None]:
    return {
        "tensor_model_parallel_size": config.tensor_model_parallel_size,
        "pipeline_model_parallel_size": config.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": config.virtual_pipeline_model_parallel_size,
        "context_parallel_size": config.context_parallel_size,
    }


_cut: dict[str, int | None] | None = None


def join(config: MegatronConfig, seed: int) -> EngineMesh:
    """This rank's place. Collective, the first time. Raises ValueError if another model of this process is cut otherwise."""
    global _cut
    wanted = cut_of(config)
    if _cut is None or not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(**wanted)
        _cut = wanted
        with torch.random.fork_rng(devices=[]):
            model_parallel_cuda_manual_seed(seed % 2**31)
    elif wanted != _cut:
        raise ValueError(f"models that share GPUs are cut alike by Megatron: one has {_cut}, another {wanted}")
    return EngineMesh(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        is_output_rank=parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_context_parallel_rank() == 0
        and parallel_state.is_pipeline_last_stage(ignore_virtual=True),
    )
