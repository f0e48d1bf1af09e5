"""Advantages of mean 0 and deviation 1, whatever estimator they come from."""

from typing import Literal

import torch
from torch import Tensor

from trainer.algorithms.moments import spread
from trainer.algorithms.segments import group_ids, row_ids, sum_by


def whitened(advantages: Tensor, response_mask: Tensor, lengths: Tensor, uid: Tensor, over: Literal["batch", "group"]) -> Tensor:
    """(A - mean) / std of the trained tokens, 0 elsewhere: (T,). advantages, response_mask (T,); lengths, uid (B,).

    over: all trained tokens of the batch (Andrychowicz et al. 2020, arXiv:2006.05990, section 3.3, where it is a mini-batch),
    or those of each prompt group's answers; a group of one answer is left as it is. The deviation is the population's, and 1
    where there is none but rounding: equal advantages (float32) become exactly 0.
    """
    trained = response_mask.bool()
    rows, values = row_ids(lengths)[trained], advantages[trained].double()
    group, size = group_ids(uid) if over == "group" else (torch.zeros_like(uid), torch.tensor([len(uid)]))
    part, n = group[rows], len(size)
    count = sum_by(torch.ones_like(values), part, n).clamp(min=1.0)
    centered = values - (sum_by(values, part, n) / count)[part]  # exact where equal: float64 has room for sums of float32
    std = spread((sum_by(centered.square(), part, n) / count).sqrt())
    alone = (size == 1)[part] if over == "group" else torch.zeros_like(part, dtype=torch.bool)
    out = torch.zeros_like(advantages)
    out[trained] = torch.where(alone, values, centered / std[part]).to(out.dtype)
    return out
