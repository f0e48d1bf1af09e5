"""Models, rows, a loss, an optimizer and an engine with random weights, shared by several benchmarks."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Qwen2Config

from configs.schema.common import Dtype, FSDPConfig, ModelConfig, TiledMLPConfig
from workers.batch import Batch
from workers.engine.base import EngineSpec, OptimizerSpec
from workers.engine.fsdp import fsdp_engine as fsdp
from workers.metric import Metric, Metrics
from workers.rollout.malloc_trim import keep_freed_memory

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
             "intermediate_size": 96, "vocab_size": 320, "tie_word_embeddings": True},
    "quickstart": {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                   "intermediate_size": 288, "vocab_size": 64, "tie_word_embeddings": True},
    "3m": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
           "intermediate_size": 768, "vocab_size": 460, "tie_word_embeddings": False},
    "84m": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4,
            "intermediate_size": 2048, "vocab_size": 5504, "tie_word_embeddings": False},
    "vocabulary": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
                   "intermediate_size": 96, "vocab_size": 151936, "tie_word_embeddings": True},
    "0.5b": {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
             "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True},
    "1.5b": {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
             "intermediate_size": 8960, "vocab_size": 151936, "tie_word_embeddings": True},
    "7b": {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
           "intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False},
    "32b": {"hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8,
            "intermediate_size": 27648, "vocab_size": 152064, "tie_word_embeddings": False},
    "72b": {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
            "intermediate_size": 29568, "vocab_size": 152064, "tie_word_embeddings": False},
}  # fmt: skip


class Likelihood:
    """Any loss that changes every weight."""

    needs = frozenset({"log_probs"})

    def __call__(self, outputs: dict[str, Tensor], micro_batch: Batch) -> tuple[Tensor, Metrics]:
        return -outputs["log_probs"], {}


class LikelihoodAndEntropy(Likelihood):
    """Likelihood that also measures the entropy as the actor's loss does: of all tokens (full), or of entropy_mask (sampled)."""

    def __init__(self, kind: str) -> None:
        self.output = {"full": "entropy", "sampled": "sampled_entropy"}[kind]
        self.needs = frozenset({"log_probs", self.output})

    def __call__(self, outputs: dict[str, Tensor], micro_batch: Batch) -> tuple[Tensor, Metrics]:
        mask = micro_batch.tokens["response_mask" if self.output == "entropy" else "entropy_mask"]
        return -outputs["log_probs"], {"entropy": Metric.token_mean(outputs[self.output], mask)}


def likelihood(config: None) -> Likelihood:
    """Factory of the loss, for a LossSpec."""
    return Likelihood()


ADAMW = OptimizerSpec(
    lr=1e-4, betas=(0.9, 0.999), weight_decay=0.0, schedule="constant", warmup_steps=0, total_steps=100,
    min_lr_ratio=0.0, num_cycles=0.5, clip_grad=1.0,
)  # fmt: skip


def qwen2(shape: str, longest: int = 8192) -> Qwen2Config:
    """Configuration of a Qwen2 model of this shape. longest: maximum tokens of a row."""
    return Qwen2Config(max_position_embeddings=longest, bos_token_id=None, eos_token_id=1, pad_token_id=0, **SHAPES[shape])


def random_rows(shape: str, lengths: Sequence[int]) -> Batch:
    """Rows of random tokens, all of which are trained."""
    total = sum(lengths)
    draw = torch.Generator().manual_seed(1)
    return Batch(lengths=torch.tensor(lengths), meta={"temperature": 1.0}).with_tokens(
        input_ids=torch.randint(2, SHAPES[shape]["vocab_size"], (total,), generator=draw),
        response_mask=torch.ones(total, dtype=torch.int64),
        loss_weight=torch.full((total,), 1.0 / total),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoneEngine:
    """Settings of an FSDP engine with random weights on a single rank.

    shape: a name in SHAPES. model_dtype: of parameters, gradients and moments; dtype: of the arithmetic. offload: layer inputs on
    the host. pieces: number of slices of the tokens that an MLP processes in turn.
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
    compiled: bool = False

    def build(self, folder: Path) -> fsdp.FSDPEngine:
        """Build the engine in a new process group; weights are generated on the device. folder: an empty directory."""
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
            use_no_sync_for_gradient_accumulation=False, use_torch_compile=self.compiled, param_offload=False,
            optimizer_offload=self.optimizer_offload, fsdp_size=-1, ulysses_sequence_parallel_size=1,
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
