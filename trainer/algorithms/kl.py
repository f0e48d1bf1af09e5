"""KL(policy || reference): estimators from sampled tokens, the reward penalty, and controllers of its coefficient."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.schema.common import KLKind
from configs.schema.ppo import AlgorithmConfig, KLControlConfig
from trainer.algorithms.segments import sum_by
from workers.batch import Batch


def kl_estimate(kind: KLKind, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """KL estimate of each sampled token, any shape. x = log pi - log ref (Schulman 2020, joschu.net/blog/kl-approx.html).

    kl, k1: x (unbiased);  abs: |x|;  mse, k2: x^2 / 2;  low_var_kl, k3: exp(-x) - 1 + x (unbiased, never negative).
    For k3 x is clamped to +-20 and the result to +-10, against overflow of exp.
    full: the exact sum over the vocabulary; log_probs and ref_log_probs are then full distributions, (..., V) -> (...).

    A trailing + keeps the value and takes the gradient of k2, which is unbiased for the gradient of the KL; those of k1 and k3
    are not (Tang & Munos 2025, arXiv:2506.09477). The gradient of full is exact already. Raises ValueError for another kind.
    """
    if kind in ("full", "full+"):
        return (log_probs.exp() * (log_probs - ref_log_probs)).sum(-1)
    value = _sampled(kind.removesuffix("+"), log_probs - ref_log_probs)
    if not kind.endswith("+"):
        return value
    # Straight-through: k2 - k2.detach() is 0 in the forward pass and has the gradient of k2 in the backward pass.
    k2 = _sampled("k2", log_probs - ref_log_probs)
    return value.detach() + (k2 - k2.detach())


def _sampled(kind: str, log_ratio: Tensor) -> Tensor:
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
    raise ValueError(f"unknown KL estimator {kind}: must be kl, abs, mse, low_var_kl or full, each optionally with a trailing +")


def columns(kind: KLKind) -> str:
    """Model output that this kind reads: log_probs (T,) or all_log_probs (T, V)."""
    return "all_log_probs" if kind in ("full", "full+") else "log_probs"


@dataclass
class KLController:
    """Coefficient of the KL penalty in the reward: fixed or adaptive (Ziegler et al. 2019, arXiv:1909.08593, section 2.2).

    Adaptive: error = clip(kl / target - 1, -0.2, 0.2); coefficient *= 1 + error * n / horizon.
    """

    config: KLControlConfig
    coefficient: float

    @classmethod
    def start(cls, config: KLControlConfig) -> KLController:
        return cls(config, config.kl_coef)

    def update(self, kl: float, n_sequences: int) -> None:
        """Adapt the coefficient to the step's mean KL ``kl`` over ``n_sequences`` responses; no effect if kl is not finite."""
        # A NaN would never leave the coefficient.
        if self.config.type == "adaptive" and math.isfinite(kl):
            # Bounded: one step changes the coefficient by at most the fraction 0.2 n / horizon.
            error = min(max(kl / self.config.target_kl - 1.0, -0.2), 0.2)
            self.coefficient *= 1.0 + error * n_sequences / self.config.horizon

    def state(self) -> dict[str, float]:
        return {"coefficient": self.coefficient}

    def load(self, state: dict[str, float]) -> None:
        self.coefficient = state["coefficient"]


def reward_with_kl(
    token_rewards: Tensor,
    log_probs: Tensor,
    ref_log_probs: Tensor,
    mask: Tensor,
    kind: KLKind,
    coefficient: float,
    clip: float | None,
) -> tuple[Tensor, Tensor]:
    """Token rewards minus coefficient * KL, and the KL, zero outside ``mask``; all (T,), for kind full log-probs (T, V).

    Ziegler et al. 2019, arXiv:1909.08593, eq. 2. clip: the penalty uses the KL clamped to [-clip, clip] per token, so that no
    single token dominates the reward of a response; the returned KL is not clamped.
    """
    kl = torch.where(mask.bool(), kl_estimate(kind, log_probs, ref_log_probs), 0.0)
    return token_rewards - coefficient * (kl if clip is None else kl.clamp(-clip, clip)), kl


def apply_kl_penalty(
    batch: Batch, token_rewards: Tensor, config: AlgorithmConfig, controller: KLController
) -> tuple[Tensor, dict[str, float]]:
    """Token rewards (T,) minus the KL penalty, and metrics; updates the controller.

    batch: response_mask, old_log_probs and ref_log_probs (for kind full: old_ and ref_all_log_probs). The metric
    actor/reward_kl_penalty, which drives an adaptive coefficient, is the mean over responses of their token means, as in verl:
    responses count equally, whatever their length.
    """
    column, mask = columns(config.kl_penalty), batch.tokens["response_mask"]
    old, ref = batch.tokens[f"old_{column}"], batch.tokens[f"ref_{column}"]
    coefficient, clip = controller.coefficient, config.kl_clip
    rewards, kl = reward_with_kl(token_rewards, old, ref, mask, config.kl_penalty, coefficient, clip)
    rows = batch.segment_ids()
    response_kl = sum_by(kl, rows, len(batch)) / sum_by(mask, rows, len(batch)).clamp(min=1.0)
    mean_kl = float(response_kl.mean())
    metrics = {"actor/reward_kl_penalty": mean_kl, "actor/reward_kl_penalty_coeff": coefficient}
    if clip is not None:
        metrics["actor/reward_kl_clipfrac"] = float((kl.abs() > clip).sum() / mask.sum())
    # Last: this step's rewards use the coefficient that its metrics report; the new one takes effect in the next step.
    controller.update(mean_kl, len(batch))
    return rewards, metrics
