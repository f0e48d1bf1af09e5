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


def first_in(mask: Tensor, lengths: Tensor) -> Tensor:
    """Position in its row of the first token in ``mask`` (T,); the length of a row without one: int64 (B,)."""
    data, rows = _rows(mask, lengths)
    found = [found - start if (found := data.find(1, start, end)) >= 0 else end - start for start, end in rows]
    return torch.tensor(found, dtype=torch.int64, device=mask.device)


def last_in(mask: Tensor, lengths: Tensor) -> Tensor:
    """Position in its row of the last token in ``mask`` (T,); the last position of a row without one: int64 (B,)."""
    data, rows = _rows(mask, lengths)
    found = [found - start if (found := data.rfind(1, start, end)) >= 0 else end - start - 1 for start, end in rows]
    return torch.tensor(found, dtype=torch.int64, device=mask.device)


def _rows(mask: Tensor, lengths: Tensor) -> tuple[bytes, list[tuple[int, int]]]:
    """A byte for each token, 1 in ``mask`` (T,), and start and end of each row: bytes are searched at memory speed."""
    ends = lengths.cumsum(0).tolist()
    return mask.bool().cpu().numpy().tobytes(), list(zip([0, *ends], ends, strict=False))


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
