"""Running mean and standard deviation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
