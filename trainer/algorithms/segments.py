"""Segment sums over rows and groups of flat tensors.

Everything is in float64: sums of float32 terms are then exact enough that results do not depend on the order of the terms or on
how the batch was split.
"""

import torch
from torch import Tensor

from workers.batch import repeat_rows


def row_ids(lengths: Tensor) -> Tensor:
    """Row index of each token: lengths (B,) -> int64 (T,)."""
    return repeat_rows(torch.arange(len(lengths), device=lengths.device), lengths)


def counts_in(mask: Tensor, lengths: Tensor) -> Tensor:
    """Number of tokens of each row in ``mask`` (T,): int64 (B,)."""
    _, begin, end = _chosen(mask, lengths)
    return end - begin


def first_in(mask: Tensor, lengths: Tensor) -> Tensor:
    """Position in its row of the first token in ``mask`` (T,); the length of a row without one: int64 (B,)."""
    tokens, begin, end = _chosen(mask, lengths)
    return torch.where(end > begin, tokens[begin.clamp(max=len(tokens) - 1)] - (lengths.cumsum(0) - lengths), lengths)


def last_in(mask: Tensor, lengths: Tensor) -> Tensor:
    """Position in its row of the last token in ``mask`` (T,); the last position of a row without one: int64 (B,)."""
    tokens, begin, end = _chosen(mask, lengths)
    return torch.where(end > begin, tokens[end - 1] - (lengths.cumsum(0) - lengths), lengths - 1)


def _chosen(mask: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens in ``mask`` (T,), ascending, at least one entry; how many of them come before each row and before its end (B,)."""
    ends = lengths.cumsum(0)
    tokens = mask.bool().nonzero()[:, 0]
    # A search per row in place of arithmetic per token.
    begin, end = torch.searchsorted(tokens, ends - lengths), torch.searchsorted(tokens, ends)
    return tokens if len(tokens) else tokens.new_zeros(1), begin, end


def sum_rows(values: Tensor, lengths: Tensor) -> Tensor:
    """Sum ``values`` (T,) by row, as ``sum_by`` with ``row_ids``, without their memory: float64 (B,)."""
    return torch.segment_reduce(values.double(), "sum", lengths=lengths)


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
