"""Estimators of KL(policy || reference) from sampled tokens, and the controllers of its coefficient."""

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
    """KL of each sampled token, any shape. x = log pi - log ref (Schulman 2020, joschu.net/blog/kl-approx.html).

    kl, k1: x (unbiased);  abs: |x|;  mse, k2: x^2 / 2;  low_var_kl, k3: exp(-x) - 1 + x (unbiased, never negative).
    For k3 x is clamped to +-20 and the result to +-10: exp must not overflow.
    full: the exact sum over the vocabulary; log_probs and ref_log_probs are then whole distributions, (..., V) -> (...).

    With a + behind it: this value, with the gradient of k2, which is the KL's own in expectation, as those of k1 and k3 are
    not (Tang & Munos 2025, arXiv:2506.09477). The gradient of full is the KL's own already.
    """
    if kind in ("full", "full+"):
        return (log_probs.exp() * (log_probs - ref_log_probs)).sum(-1)
    value = _sampled(kind.removesuffix("+"), log_probs - ref_log_probs)
    if not kind.endswith("+"):
        return value
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
    raise ValueError(f"{kind} is no kind of KL: kl, abs, mse, low_var_kl, full, each also with +")


def columns(kind: KLKind) -> str:
    """The output of a model that this kind reads: log_probs (T,), or all_log_probs (T, V)."""
    return "all_log_probs" if kind in ("full", "full+") else "log_probs"


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
        """kl: mean over the step's answers, without effect if it is not finite; n_sequences: how many there were."""
        if self.config.type == "adaptive" and math.isfinite(kl):
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
    """Token rewards less coefficient * KL, and the KL itself, zero outside ``mask``; all (T,). For full, log-probs (T, V).

    Ziegler et al. 2019, arXiv:1909.08593, eq. 2. clip: the reward takes the KL of a token within
    [-clip, clip], so that no single one decides about an answer; the KL that is told is all of it.
    """
    kl = torch.where(mask.bool(), kl_estimate(kind, log_probs, ref_log_probs), 0.0)
    return token_rewards - coefficient * (kl if clip is None else kl.clamp(-clip, clip)), kl


def apply_kl_penalty(
    batch: Batch, token_rewards: Tensor, config: AlgorithmConfig, controller: KLController
) -> tuple[Tensor, dict[str, float]]:
    """Token rewards (T,) less the KL penalty, and metrics; updates the controller.

    batch: response_mask, and old_ and ref_ log_probs (of full: all_log_probs). actor/reward_kl_penalty, which steers an adaptive
    coefficient, is the mean over responses of their token means, as in verl: a long response counts as much as a short one.
    """
    column, mask = columns(config.kl_penalty), batch.tokens["response_mask"]
    old, ref = batch.tokens[f"old_{column}"], batch.tokens[f"ref_{column}"]
    coefficient, clip = controller.coefficient, config.kl_clip
    rewards, kl = reward_with_kl(token_rewards, old, ref, mask, config.kl_penalty, coefficient, clip)
    rows = batch.segment_ids()
    of_response = sum_by(kl, rows, len(batch)) / sum_by(mask, rows, len(batch)).clamp(min=1.0)
    mean_kl = float(of_response.mean())
    metrics = {"actor/reward_kl_penalty": mean_kl, "actor/reward_kl_penalty_coeff": coefficient}
    if clip is not None:
        metrics["actor/reward_kl_clipfrac"] = float((kl.abs() > clip).sum() / mask.sum())
    controller.update(mean_kl, len(batch))
    return rewards, metrics
