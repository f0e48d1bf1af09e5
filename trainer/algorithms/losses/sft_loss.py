"""Loss of supervised training."""

from typing import Any

from torch import Tensor

from workers.batch import Batch
from workers.metric import Metric, Metrics


class NextTokenLoss:
    """Cross-entropy (T,) of the tokens in response_mask; the factory named by a LossSpec, without settings."""

    needs = frozenset({"log_probs"})

    def __init__(self, config: Any) -> None:
        assert config is None, "next-token loss has no settings"

    def __call__(self, outputs: dict[str, Tensor], micro_batch: Batch) -> tuple[Tensor, Metrics]:
        loss = -outputs["log_probs"]
        return loss, {"train/loss": Metric.token_mean(loss, micro_batch.tokens["response_mask"])}
