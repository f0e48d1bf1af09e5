"""Models, rows, a loss and an optimizer that several benchmarks measure with."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2Config

from workers.batch import Batch
from workers.engine.base import OptimizerSpec
from workers.metric import Metric, Metrics

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
    """And the entropy as the actor's loss measures it: of all tokens (full), or of those in entropy_mask (sampled)."""

    def __init__(self, kind: str) -> None:
        self.output = {"full": "entropy", "sampled": "sampled_entropy"}[kind]
        self.needs = frozenset({"log_probs", self.output})

    def __call__(self, outputs: dict[str, Tensor], micro_batch: Batch) -> tuple[Tensor, Metrics]:
        mask = micro_batch.tokens["response_mask" if self.output == "entropy" else "entropy_mask"]
        return -outputs["log_probs"], {"entropy": Metric.token_mean(outputs[self.output], mask)}


def likelihood(config: None) -> Likelihood:
    """For a LossSpec."""
    return Likelihood()


ADAMW = OptimizerSpec(
    lr=1e-4, betas=(0.9, 0.999), weight_decay=0.0, schedule="constant", warmup_steps=0, total_steps=100,
    min_lr_ratio=0.0, num_cycles=0.5, clip_grad=1.0,
)  # fmt: skip


def qwen2(shape: str, longest: int = 8192) -> Qwen2Config:
    """longest: tokens of a row."""
    return Qwen2Config(max_position_embeddings=longest, bos_token_id=None, eos_token_id=1, pad_token_id=0, **SHAPES[shape])


def random_rows(shape: str, lengths: Sequence[int]) -> Batch:
    """Rows of random tokens, each of which counts."""
    total = sum(lengths)
    draw = torch.Generator().manual_seed(1)
    return Batch(lengths=torch.tensor(lengths), meta={"temperature": 1.0}).with_tokens(
        input_ids=torch.randint(2, SHAPES[shape]["vocab_size"], (total,), generator=draw),
        response_mask=torch.ones(total, dtype=torch.int64),
        loss_weight=torch.full((total,), 1.0 / total),
    )
