"""Running mean and standard deviation."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class RunningMoments:
    """Of all values seen so far, in float64 (Chan, Golub & LeVeque 1983, eq. 2.1). Nothing seen: mean 0, deviation 1."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    @property
    def std(self) -> float:
        """The sample's; 1 until two unequal values have been seen."""
        variance = self.squares / (self.count - 1) if self.count > 1 else 0.0
        return variance**0.5 if variance > 0 else 1.0

    def see(self, values: Tensor) -> None:
        """values: (N,)."""
        wide, n = values.double(), len(values)
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
        self.count, self.mean, self.squares = state["count"], state["mean"], state["squares"]
