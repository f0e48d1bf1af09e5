"""Mean and standard deviation: running over batches, and whitening of advantages (mean 0, standard deviation 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trainer.algorithms.segments import group_ids, row_ids, sum_by


def spread(std: Tensor) -> Tensor:
    """Standard deviations safe to divide by: 1 where they are 0 up to rounding."""
    return torch.where(std < 1e-6, 1.0, std)


@dataclass(slots=True)
class RunningMoments:
    """Running mean and population standard deviation in float64, merged batch by batch (Chan, Golub & LeVeque 1979).

    Without values: mean 0, standard deviation 1.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @property
    def std(self) -> float:
        """Population standard deviation; 1 until two different values have been recorded, so that it can be divided by."""
        return float(spread(torch.tensor((self.squares / max(self.count, 1)) ** 0.5, dtype=torch.float64)))

    def update(self, values: Tensor) -> None:
        """Record ``values`` (N,). Non-finite values are ignored: a single NaN would never leave the moments."""
        wide = values[values.isfinite()].double()
        n = len(wide)
        if not n:
            return
        mean = float(wide.mean())
        # Pairwise merge of two sums of squared deviations; subtracting squared sums instead would cancel catastrophically.
        gap, total = mean - self.mean, self.count + n
        self.squares += float((wide - mean).square().sum()) + gap**2 * self.count * n / total
        self.mean += gap * n / total
        self.count = total

    def state(self) -> dict[str, float]:
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load(self, state: dict[str, float]) -> None:
        self.count, self.mean, self.squares = int(state["count"]), state["mean"], state["squares"]


def whitened(
    advantages: Tensor, response_mask: Tensor, lengths: Tensor, group: Tensor, over: Literal["batch", "group"]
) -> Tensor:
    """(A - mean) / std of the trained tokens, 0 elsewhere: (T,). advantages, response_mask (T,); lengths, group (B,).

    over: "batch", all trained tokens (Andrychowicz et al. 2020, arXiv:2006.05990, section 3.3, per mini-batch), or "group",
    those of each prompt's responses; a group of one response is unchanged. The standard deviation is the population's, and 1
    where it is 0 up to rounding: equal advantages (float32) give exactly 0.
    """
    trained = response_mask.bool()
    rows, values = row_ids(lengths)[trained], advantages[trained].double()
    index, size = group_ids(group) if over == "group" else (torch.zeros_like(group), torch.tensor([len(group)]))
    part, n = index[rows], len(size)
    count = sum_by(torch.ones_like(values), part, n).clamp(min=1.0)
    # Exactly 0 for equal float32 advantages: float64 has room for the exact sum of many equal float32 numbers.
    centered = values - (sum_by(values, part, n) / count)[part]
    std = spread((sum_by(centered.square(), part, n) / count).sqrt())
    alone = (size == 1)[part] if over == "group" else torch.zeros_like(part, dtype=torch.bool)
    out = torch.zeros_like(advantages)
    out[trained] = torch.where(alone, values, centered / std[part]).to(out.dtype)
    return out
