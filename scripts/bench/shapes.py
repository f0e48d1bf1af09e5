"""Models and a loss that several benchmarks measure with."""

from typing import Any

from torch import Tensor

from workers.batch import Batch
from workers.metric import Metrics

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
             "intermediate_size": 96, "vocab_size": 320, "tie_word_embeddings": True},
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
