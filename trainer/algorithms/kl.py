"""Estimators of KL(policy || reference) from sampled tokens, and the controllers of its coefficient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from configs.schema.ppo import KLControlConfig, KLKind


def kl_estimate(kind: KLKind, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """KL of each sampled token, any shape. x = log pi - log ref (Schulman 2020, joschu.net/blog/kl-approx.html).

    kl, k1: x (unbiased);  abs: |x|;  mse, k2: x^2 / 2;  low_var_kl, k3: exp(-x) - 1 + x (unbiased, never negative).
    For k3 x is clamped to +-20 and the result to +-10: exp must not overflow.
    """
    log_ratio = log_probs - ref_log_probs
    match kind:
        case "kl" | "k1":
            return log_ratio
        case "abs":
            return log_ratio.abs()
        case "mse" | "k2":
            return 0.5 * log_ratio.square()
        case "low_var_kl" | "k3":
            clamped = (-log_ratio).clamp(-20.0, 20.0)
            return (clamped.exp() - clamped - 1.0).clamp(-10.0, 10.0)


@dataclass
class KLController:
    """The coefficient of the KL in the reward: fixed, or adaptive (Ziegler et al. 2019, arXiv:1909.08593, section 2.2).

    Adaptive: error = clip(kl / target - 1, -0.2, 0.2); coefficient *= 1 + error * n / horizon.
    """

    config: KLControlConfig
    coefficient: float

    @classmethod
    def start(cls, config: KLControlConfig) -> KLController:
        return cls(config, config.kl_coef)

    def update(self, kl: float, n_sequences: int) -> None:
        """kl: mean over the step's answers; n_sequences: how many there were."""
        if self.config.type == "adaptive":
            error = min(max(kl / self.config.target_kl - 1.0, -0.2), 0.2)
            self.coefficient *= 1.0 + error * n_sequences / self.config.horizon

    def state(self) -> dict[str, float]:
        return {"coefficient": self.coefficient}

    def load(self, state: dict[str, float]) -> None:
        self.coefficient = state["coefficient"]


def reward_with_kl(
    token_rewards: Tensor, log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, kind: KLKind, coefficient: float
) -> tuple[Tensor, Tensor]:
    """Token rewards less coefficient * KL, and the KL itself, zero outside ``mask``; all (T,).

    Ziegler et al. 2019, arXiv:1909.08593, eq. 2.
    """
    kl = torch.where(mask.bool(), kl_estimate(kind, log_probs, ref_log_probs), 0.0)
    return token_rewards - coefficient * kl, kl
