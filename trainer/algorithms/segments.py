"""Sums over rows and groups of flat tensors. All of it in float64, so that neither the order of terms nor the way a batch
was cut shows in a result."""

import torch
from torch import Tensor


def row_ids(lengths: Tensor) -> Tensor:
    """The row of each token: lengths (B,) -> int64 (T,)."""
    return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)


def sum_by(values: Tensor, index: Tensor, n: int) -> Tensor:
    """Sums of ``values`` (N,) by ``index`` (N,), differentiable: float64 (n,)."""
    return torch.zeros(n, dtype=torch.float64, device=values.device).index_add(0, index, values.double())


def group_ids(uid: Tensor) -> tuple[Tensor, Tensor]:
    """uid (B,), in any order -> number of each row's group, int64 (B,), and the groups' sizes (G,)."""
    _, group, size = torch.unique(uid, return_inverse=True, return_counts=True)
    return group, size


def discounted_to_come(values: Tensor, counts: Tensor, factor: float) -> Tensor:
    """sum_l factor^l values[t + l] to the end of each row, float64 (N,); values (N,): rows of ``counts`` (B,) end to end."""
    out = values.double().clone()
    last = counts.cumsum(0) - 1
    for step in range(1, int(counts.max()) if len(counts) else 0):  # over rows at once, backwards from each one's end
        here = (last - step)[counts > step]
        out[here] += factor * out[here + 1]
    return out


def whiten(values: Tensor) -> Tensor:
    """Zero mean, unit sample variance over all entries (N,), variance + 1e-8 under the root; a single entry becomes 0."""
    wide = values.double()
    variance = wide.var() if len(wide) > 1 else wide.new_zeros(())
    return (wide - wide.mean()) * torch.rsqrt(variance + 1e-8)
