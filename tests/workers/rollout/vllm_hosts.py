"""Hosts with a trained actor and vLLM beside it: what a worker of a run has."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from configs.schema.common import FSDPConfig, ModelConfig
from tests.workers.rollout.engines import make_model
from workers.controller.group import WorkerInfo
from workers.controller.shell import free_port
from workers.engine.base import EngineSpec, OptimizerSpec
from workers.host import Host
from workers.rollout.base import Completion, Request, RolloutSpec

# vLLM's attention on CPU wants heads of 32 at least.
SIZES: dict[str, object] = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 96}


def place() -> WorkerInfo:
    return WorkerInfo(rank=0, world_size=1, local_rank=0, node_rank=0, master_addr="127.0.0.1", master_port=free_port())


def make_small(path: Path, architecture: str = "qwen2", **changes: object) -> PreTrainedModel:
    return make_model(path, architecture, **(SIZES | changes))


def actor_spec(model: ModelConfig) -> EngineSpec:
    return EngineSpec(
        strategy="fsdp",
        model=model,
        head="lm",
        fsdp=FSDPConfig(
            model_dtype="float32", dtype="float32", reshard_after_forward=True, param_offload=False, optimizer_offload=False
        ),
        optimizer=OptimizerSpec(
            lr=1e-2, betas=(0.9, 0.999), weight_decay=0.0, schedule="constant", warmup_steps=0, total_steps=10,
            min_lr_ratio=0.0, num_cycles=0.5, clip_grad=1.0,
        ),
        device="cpu",
        seed=0,
    )  # fmt: skip
