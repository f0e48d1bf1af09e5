"""The FSDP engine of one rank, on random weights that come from nowhere: what several benchmarks measure."""

from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from configs.schema.common import Dtype, FSDPConfig, ModelConfig, TiledMLPConfig
from scripts.bench.shapes import ADAMW, qwen2
from workers.engine.base import EngineSpec
from workers.engine.fsdp import fsdp_engine as fsdp
from workers.rollout.malloc_trim import keep_freed_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class LoneEngine:
    """shape: a name in shapes.py. model_dtype: of parameters, gradients and moments; dtype: of the arithmetic. offload: layer
    inputs on the host. pieces: of the tokens that an MLP takes in turn.
    """

    shape: str
    device: str
    model_dtype: Dtype
    dtype: Dtype
    trained: bool = True
    recompute: bool = False
    offload: bool = False
    pieces: int = 1
    optimizer_offload: bool = False

    def build(self, folder: Path) -> fsdp.FSDPEngine:
        """Joins a process group of its own; weights are drawn on the device. folder: an empty directory."""
        qwen2(self.shape, longest=1 << 22).save_pretrained(folder)
        (folder / "model.safetensors").touch()
        model = ModelConfig(
            path=str(folder), trust_remote_code=False, enable_gradient_checkpointing=self.recompute,
            override_config={}, enable_activation_offload=self.offload,
            tiled_mlp=TiledMLPConfig(enabled=self.pieces > 1, num_shards=self.pieces),
            lora_rank=0, lora_alpha=16.0, target_modules="all-linear", lora_adapter_path=None, router_aux_loss_coef=0.0,
        )  # fmt: skip
        sharding = FSDPConfig(
            model_dtype=self.model_dtype, dtype=self.dtype, reshard_after_forward=True,
            use_no_sync_for_gradient_accumulation=False, param_offload=False, optimizer_offload=self.optimizer_offload,
            fsdp_size=-1, ulysses_sequence_parallel_size=1,
        )  # fmt: skip
        cuda = self.device == "cuda"
        if not cuda:
            keep_freed_memory()  # as workers do
        meeting = f"file://{folder}/rendezvous"
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", init_method=meeting, rank=0, world_size=1)
        spec = EngineSpec(model, "lm", sharding, ADAMW if self.trained else None, "cuda" if cuda else "cpu", 0)
        with mock.patch.object(fsdp, "stored_weights"), mock.patch.object(fsdp, "description"), mock.patch.object(fsdp, "fill"):
            engine = fsdp.FSDPEngine(spec, sharding)
        torch.manual_seed(0)
        for name, weight in (engine.live_weights() or {}).items():
            weight.fill_(1.0) if "norm" in name else weight.normal_(0.0, 0.02)
        for name, buffer in engine._model.named_buffers():
            assert name.endswith("inv_freq"), name
            buffer.copy_(10_000.0 ** -torch.linspace(0, 1, len(buffer)))
        return engine
