"""Value loss of the critic."""

import torch
from torch import Tensor

from configs.schema.ppo import CriticConfig
from workers.batch import Batch
from workers.metric import Metric, Metrics


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, cliprange: float) -> tuple[Tensor, Tensor]:
    """Clipped value loss (T,) and where the clip is active, bool (T,); all inputs (T,).

    max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2 (the implementation of Schulman et al. 2017; Engstrom et al. 2020,
    arXiv:2005.12729, section 3).
    """
    clipped = values.clamp(old_values - cliprange, old_values + cliprange)
    plain_error, clipped_error = (values - returns).square(), (clipped - returns).square()
    return 0.5 * torch.maximum(plain_error, clipped_error), clipped_error > plain_error


class CriticLoss:
    """Token loss (T,) and metrics of the critic; the factory named by a LossSpec.

    Reads values (before the update), returns, response_mask and loss_weight, all (T,).
    """

    needs = frozenset({"values"})

    def __init__(self, config: CriticConfig) -> None:
        self.config = config

    def __call__(self, outputs: dict[str, Tensor], micro_batch: Batch) -> tuple[Tensor, Metrics]:
        tokens = micro_batch.tokens
        loss, is_clipped = clipped_value_loss(outputs["values"], tokens["values"], tokens["returns"], self.config.cliprange_value)
        return loss, {
            "critic/vf_loss": Metric.sum((loss.detach() * tokens["loss_weight"]).sum()),
            "critic/vf_clipfrac": Metric.token_mean(is_clipped, tokens["response_mask"]),
            "critic/vpred_mean": Metric.token_mean(outputs["values"], tokens["response_mask"]),
        }
