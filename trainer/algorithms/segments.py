"""Segment sums over rows and groups of flat tensors.

Everything is in float64: sums of float32 terms are then exact enough that results do not depend on the order of the terms or on
how the batch was split.
"""

import torch
from torch import Tensor


def row_ids(lengths: Tensor) -> Tensor:
    """Row index of each token: lengths (B,) -> int64 (T,)."""
    return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)


def counts_in(mask: Tensor, lengths: Tensor) -> Tensor:
    """Number of tokens of each row in ``mask`` (T,): int64 (B,)."""
    return torch.bincount(row_ids(lengths)[mask.bool()], minlength=len(lengths))


def first_in(mask: Tensor, lengths: Tensor) -> Tensor:
    """Position in its row of the first token in ``mask`` (T,); the length of a row without one: int64 (B,)."""
    chosen, starts = mask.bool(), lengths.cumsum(0) - lengths
    rows = row_ids(lengths)[chosen]
    return lengths.scatter_reduce(0, rows, chosen.nonzero()[:, 0] - starts[rows], "amin")


def last_in(mask: Tensor, lengths: Tensor) -> Tensor:
    """Position in its row of the last token in ``mask`` (T,); the last position of a row without one: int64 (B,)."""
    chosen, starts = mask.bool(), lengths.cumsum(0) - lengths
    rows = row_ids(lengths)[chosen]
    found = torch.full_like(lengths, -1).scatter_reduce(0, rows, chosen.nonzero()[:, 0] - starts[rows], "amax")
    return torch.where(found < 0, lengths - 1, found)


def sum_by(values: Tensor, index: Tensor, n: int) -> Tensor:
    """Sum ``values`` (N,) by segment ``index`` (N,), differentiable: float64 (n,)."""
    return torch.zeros(n, dtype=torch.float64, device=values.device).index_add(0, index, values.double())


def group_ids(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Dense group index of each row, int64 (B,), and group sizes (G,), from group numbers (B,) in any order."""
    _, group, size = torch.unique(numbers, return_inverse=True, return_counts=True)
    return group, size


def discounted_to_come(values: Tensor, counts: Tensor, factor: float | Tensor) -> Tensor:
    """Discounted suffix sums sum_l factor^l values[t + l] within each row, float64 (N,).

    values (N,): rows of ``counts`` (B,) entries, concatenated. factor: a number, or that between each entry and the next (N,).
    """
    out = values.double().clone()
    factors = torch.as_tensor(factor, dtype=torch.float64).expand(len(out))
    last = counts.cumsum(0) - 1
    # Backwards from the end of each row, all rows at once: as many iterations as the longest row has tokens, without padding.
    for step in range(1, int(counts.max()) if len(counts) else 0):
        here = (last - step)[counts > step]
        out[here] += factors[here] * out[here + 1]
    return out


def whiten(values: Tensor) -> Tensor:
    """Normalise all entries (N,) to zero mean and unit sample variance (variance + 1e-8); equal entries give exactly 0."""
    # Shift by the first entry: equal entries are then exactly 0, so rounding of the mean cannot be amplified by the division.
    wide = values.double() - values[:1].double()
    variance = wide.var() if len(wide) > 1 else wide.new_zeros(())
    return (wide - wide.mean()) * torch.rsqrt(variance + 1e-8)
