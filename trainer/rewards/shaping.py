"""From the scorer's score to the reward that is trained on: the overlong penalty, then clipping, then normalisation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from configs.schema.ppo import RewardKwargsConfig, ShapingConfig

NO_SPREAD = 1e-6
"""A standard deviation below this is rounding: then nothing is divided by it."""


def overlong_penalty(response_lengths: Tensor, config: RewardKwargsConfig) -> Tensor:
    """Soft overlong punishment (DAPO, Yu et al. 2025, arXiv:2503.14476, eq. 13), times penalty_factor: float32 (B,), <= 0.

    response_lengths (B,): response tokens that are trained. Nothing up to max_resp_len - len tokens, from there in a line
    to -penalty_factor at max_resp_len, and that beyond it. An answer that was cut at max_resp_len pays the whole penalty.
    """
    buffer = config.overlong_buffer_cfg
    if not buffer.enable:
        return torch.zeros(len(response_lengths))
    over = (response_lengths.double() - (config.max_resp_len - buffer.len)) / buffer.len
    return (-buffer.penalty_factor * over.clamp(0.0, 1.0)).float()


def group_moments(rewards: Tensor, uid: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (population) of each row's group, by rows: float64 (B,) both. uid (B,): prompt group."""
    _, group = torch.unique(uid, return_inverse=True)
    size = torch.bincount(group).double()
    values = rewards.double()
    mean = torch.zeros_like(size).index_add_(0, group, values) / size
    variance = torch.zeros_like(size).index_add_(0, group, (values - mean[group]) ** 2) / size
    return mean[group], variance.sqrt()[group]


def standardised(values: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """(values - mean) / std (B,), in float32; without the division where there is no spread."""
    return ((values.double() - mean) / torch.where(std < NO_SPREAD, 1.0, std)).float()


@dataclass(slots=True)
class RunningMoments:
    """Mean and standard deviation (population) of all that was seen (Welford 1962; batches as in Chan et al. 1979)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared differences from the mean."""

    def update(self, values: Tensor) -> None:
        """values (B,), B > 0."""
        new = values.double()
        mean, n, total = float(new.mean()), len(new), self.count + len(new)
        delta = mean - self.mean
        self.squares += float(((new - mean) ** 2).sum()) + delta * delta * self.count * n / total
        self.mean += delta * n / total
        self.count = total

    @property
    def std(self) -> float:
        return (self.squares / self.count) ** 0.5 if self.count else 0.0

    def state(self) -> dict[str, float]:
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load(self, state: dict[str, float]) -> None:
        self.count, self.mean, self.squares = int(state["count"]), state["mean"], state["squares"]


@dataclass(frozen=True, slots=True)
class Shaping:
    """``reward.shaping``. running: over the training rewards of all steps."""

    config: ShapingConfig
    running: RunningMoments

    def __call__(self, rewards: Tensor, uid: Tensor, baselines: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Rewards (B,) clipped and normalised; baselines (B,), each the reward of a greedy answer to the row's prompt, in the
        same way. The statistics are those of ``rewards``, with running these among them; baselines never count.
        """
        rewards = self._clip(rewards)
        baselines = None if baselines is None else self._clip(baselines)
        if self.config.normalize is None:
            return rewards, baselines
        if self.config.normalize == "group":
            mean, std = group_moments(rewards, uid)
        else:
            self.running.update(rewards)
            mean, std = torch.tensor([[self.running.mean], [self.running.std]], dtype=torch.float64)
        return standardised(rewards, mean, std), None if baselines is None else standardised(baselines, mean, std)

    def _clip(self, rewards: Tensor) -> Tensor:
        return rewards if self.config.clip is None else rewards.clamp(*self.config.clip)
