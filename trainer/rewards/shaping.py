"""Reward shaping, from scores to training rewards: length penalties, then clipping, then normalisation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from configs.schema.ppo import RewardKwargsConfig, ShapingConfig
from trainer.algorithms.moments import RunningMoments, spread
from trainer.algorithms.segments import group_ids, sum_by


def overlong_penalty(response_lengths: Tensor, config: RewardKwargsConfig) -> Tensor:
    """Soft overlong punishment (DAPO, Yu et al. 2025, arXiv:2503.14476, eq. 13) times penalty_factor: float32 (B,), <= 0.

    response_lengths (B,): trained response tokens. 0 up to max_resp_len - len tokens, from there linear to -penalty_factor at
    max_resp_len and beyond. A response truncated at max_resp_len gets the full penalty.
    """
    buffer = config.overlong_buffer_cfg
    if not buffer.enable:
        return torch.zeros(len(response_lengths))
    over = (response_lengths.double() - (config.max_resp_len - buffer.len)) / buffer.len
    return (-buffer.penalty_factor * over.clamp(0.0, 1.0)).float()


def missing_eos_penalty(finished: Tensor, penalty: float | None) -> Tensor:
    """-penalty for each truncated response (finished (B,) is 0): float32 (B,). Same as TRL's option of this name."""
    return torch.where(finished.bool(), 0.0, -(penalty or 0.0))


def group_moments(rewards: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and population standard deviation of each row's group, float64 (B,) both. group (B,): group numbers."""
    index, size = group_ids(group)
    mean = (sum_by(rewards, index, len(size)) / size)[index]
    variance = sum_by((rewards - mean).square(), index, len(size)) / size
    return mean, spread(variance.sqrt())[index]


def standardised(values: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """(values - mean) / std, float32 (B,)."""
    return ((values.double() - mean) / std).float()


@dataclass(frozen=True, slots=True)
class Shaping:
    """Clipping and normalisation by ``reward.shaping``. running: moments of the training rewards of all steps."""

    config: ShapingConfig
    running: RunningMoments

    def __call__(self, rewards: Tensor, group: Tensor, baselines: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Clip and normalise rewards (B,) and, with the same statistics, baselines (B,), the rewards of greedy responses.

        group (B,): group numbers. Statistics are those of ``rewards``; running moments include the current step. Baselines never
        enter them.
        """
        # Clip first: a single outlier would otherwise set the standard deviation of its group.
        rewards = self._clip(rewards)
        baselines = None if baselines is None else self._clip(baselines)
        if self.config.normalize is None:
            return rewards, baselines
        if self.config.normalize == "group":
            mean, std = group_moments(rewards, group)
        else:
            self.running.update(rewards)
            mean, std = (torch.tensor(value, dtype=torch.float64) for value in (self.running.mean, self.running.std))
        return standardised(rewards, mean, std), None if baselines is None else standardised(baselines, mean, std)

    def _clip(self, rewards: Tensor) -> Tensor:
        return rewards if self.config.clip is None else rewards.clamp(*self.config.clip)
