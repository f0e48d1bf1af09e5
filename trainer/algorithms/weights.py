"""Token weights of the loss aggregation modes.

A loss is a weighted sum over tokens. The weights contain the denominators of the mode and are set once, over the global
mini-batch, before it is split: gradients of micro-batches and ranks are then summed, never averaged, and the result cannot depend
on the split.
"""

from typing import get_args

from torch import Tensor

from configs.schema.common import AggMode
from trainer.algorithms.segments import sum_rows
from workers.batch import repeat_rows


def token_weights(mode: AggMode, response_mask: Tensor, lengths: Tensor, norm_length: int) -> Tensor:
    """Weight of each token, float64 (T,), such that the loss is sum(weight * token_loss).

    response_mask (T,), lengths (B,) of the global mini-batch. n_i: trained tokens of row i; N: number of rows with n_i > 0.
    token-mean 1 / sum n_i;  token-sum 1;  seq-mean-token-sum 1 / N;  seq-mean-token-mean 1 / (N n_i);
    seq-mean-token-sum-norm 1 / (N norm_length) (Dr.GRPO, Liu et al. 2025, arXiv:2503.20783).
    A mini-batch without a trained token has weight 0 everywhere.
    """
    mask = response_mask.double()
    per_row = sum_rows(mask, lengths)
    # Rows without a trained token are not counted, as in verl 0.9.1.
    n_rows = (per_row > 0).sum().clamp(min=1)
    match mode:
        case "token-mean":
            weights = mask / per_row.sum().clamp(min=1)
        case "token-sum":
            weights = mask
        case "seq-mean-token-sum":
            weights = mask / n_rows
        case "seq-mean-token-mean":
            weights = mask / repeat_rows(n_rows * per_row.clamp(min=1), lengths)
        case "seq-mean-token-sum-norm":
            weights = mask / (n_rows * norm_length)
        case _:
            raise ValueError(f"loss_agg_mode={mode}: must be one of {', '.join(get_args(AggMode))}")
    return weights
