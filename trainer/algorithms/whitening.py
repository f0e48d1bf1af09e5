"""Whitening of advantages (mean 0, standard deviation 1), independent of the estimator."""

from typing import Literal

import torch
from torch import Tensor

from trainer.algorithms.moments import spread
from trainer.algorithms.segments import group_ids, row_ids, sum_by


def whitened(advantages: Tensor, response_mask: Tensor, lengths: Tensor, uid: Tensor, over: Literal["batch", "group"]) -> Tensor:
    """(A - mean) / std of the trained tokens, 0 elsewhere: (T,). advantages, response_mask (T,); lengths, uid (B,).

    over: "batch", all trained tokens (Andrychowicz et al. 2020, arXiv:2006.05990, section 3.3, per mini-batch), or "group",
    those of each prompt's responses; a group of one response is unchanged. The standard deviation is the population's, and 1
    where it is 0 up to rounding: equal advantages (float32) give exactly 0.
    """
    trained = response_mask.bool()
    rows, values = row_ids(lengths)[trained], advantages[trained].double()
    group, size = group_ids(uid) if over == "group" else (torch.zeros_like(uid), torch.tensor([len(uid)]))
    part, n = group[rows], len(size)
    count = sum_by(torch.ones_like(values), part, n).clamp(min=1.0)
    # Exactly 0 for equal float32 advantages: float64 has room for the exact sum of many equal float32 numbers.
    centered = values - (sum_by(values, part, n) / count)[part]
    std = spread((sum_by(centered.square(), part, n) / count).sqrt())
    alone = (size == 1)[part] if over == "group" else torch.zeros_like(part, dtype=torch.bool)
    out = torch.zeros_like(advantages)
    out[trained] = torch.where(alone, values, centered / std[part]).to(out.dtype)
    return out
