"""Running mean and standard deviation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def spread(std: Tensor) -> Tensor:
    """Standard deviations to divide by: 1 where there is none but rounding."""
    return torch.where(std < 1e-6, 1.0, std)


@dataclass(slots=True)
class RunningMoments:
    """Mean and standard deviation (population) of all values seen so far, in float64 (Chan, Golub & LeVeque 1979).

    Nothing seen: mean 0, deviation 1.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @property
    def std(self) -> float:
        """1 until two unequal values have been seen: something to divide by."""
        return float(spread(torch.tensor((self.squares / max(self.count, 1)) ** 0.5, dtype=torch.float64)))

    def see(self, values: Tensor) -> None:
        """values: (N,). Those that are not finite are not seen: one of them would stay for ever."""
        wide = values[values.isfinite()].double()
        n = len(wide)
        if not n:
            return
        mean = float(wide.mean())
        gap, total = mean - self.mean, self.count + n
        self.squares += float((wide - mean).square().sum()) + gap**2 * self.count * n / total
        self.mean += gap * n / total
        self.count = total

    def state(self) -> dict[str, float]:
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load(self, state: dict[str, float]) -> None:
        self.count, self.mean, self.squares = int(state["count"]), state["mean"], state["squares"]
