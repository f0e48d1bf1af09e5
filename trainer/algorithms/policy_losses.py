"""Policy losses: the loss of each token, unweighted. Aggregation is the business of weights.py."""

from collections.abc import Callable

import torch
from torch import Tensor

from configs.schema.ppo import ActorConfig
from trainer.algorithms.kl import kl_estimate
from trainer.algorithms.registry import Registry
from workers.batch import Batch
from workers.metric import Metric, masked_extreme

PolicyLossFn = Callable[[Tensor, Tensor, Tensor, Tensor, ActorConfig], tuple[Tensor, dict[str, Metric]]]
"""(log_probs, old_log_probs, advantages, response_mask: all (T,), config) -> (loss (T,), metrics)."""

POLICY_LOSSES: Registry[PolicyLossFn] = Registry("actor_rollout_ref.actor.policy_loss.loss_mode")


@POLICY_LOSSES.register("vanilla")
def vanilla(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, config: ActorConfig
) -> tuple[Tensor, dict[str, Metric]]:
    """The clipped surrogate (Schulman et al. 2017, arXiv:1707.06347, eq. 7), its range open to both sides
    (clip-higher: Yu et al. 2025, arXiv:2503.14476, eq. 10), with dual clip (Ye et al. 2020, arXiv:1912.09729, eq. 5).

    ratio = exp(log_prob - old);  L = max(-A ratio, -A clip(ratio, 1 - low, 1 + high));  where A < 0: min(L, -A c).
    The log-ratio is clamped to +-20.
    """
    log_ratio = (log_probs - old_log_probs).clamp(-20.0, 20.0)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - config.clip_ratio_low, 1.0 + config.clip_ratio_high)
    surrogate = torch.maximum(unclipped, clipped)
    bound = -advantages * config.clip_ratio_c
    loss = torch.where(advantages < 0, torch.minimum(surrogate, bound), surrogate)
    return loss, {
        "actor/pg_clipfrac": Metric.token_mean(clipped > unclipped, response_mask),
        "actor/pg_clipfrac_lower": Metric.token_mean((surrogate > bound) & (advantages < 0), response_mask),
        "actor/ppo_kl": Metric.token_mean(-log_ratio, response_mask),
    }


class ActorLoss:
    """Policy loss, less the entropy bonus, plus the KL to the reference. The factory that a LossSpec names.

    Reads advantages, response_mask, loss_weight, old_log_probs and, with use_kl_loss, ref_log_probs: all (T,). Without
    old_log_probs this is the only update from a policy that is still the old one: its own log-probs are the old ones, and
    the mismatch with rollout_log_probs is measured here.
    """

    def __init__(self, config: ActorConfig) -> None:
        self.config = config
        self.policy_loss = POLICY_LOSSES[config.policy_loss.loss_mode]
        self.wants_entropy = config.entropy_coeff != 0.0 or config.calculate_entropy
        self.needs = frozenset({"log_probs", "entropy"} if self.wants_entropy else {"log_probs"})

    def __call__(self, outputs: dict[str, Tensor], micro_batch: Batch) -> tuple[Tensor, dict[str, Metric]]:
        config, tokens = self.config, micro_batch.tokens
        mask, weight, log_probs = tokens["response_mask"], tokens["loss_weight"], outputs["log_probs"]
        old_log_probs = tokens.get("old_log_probs", log_probs.detach())
        loss, metrics = self.policy_loss(log_probs, old_log_probs, tokens["advantages"], mask, config)
        if "old_log_probs" not in tokens:
            metrics |= mismatch(old_log_probs, tokens["rollout_log_probs"], mask)
        metrics["actor/pg_loss"] = Metric.sum((loss.detach() * weight).sum())
        if self.wants_entropy:
            metrics["actor/entropy"] = Metric.token_mean(outputs["entropy"], mask)
            loss = loss - config.entropy_coeff * outputs["entropy"]
        if config.use_kl_loss:
            kl = kl_estimate(config.kl_loss_type, log_probs, tokens["ref_log_probs"])
            metrics["actor/kl_loss"] = Metric.sum((kl.detach() * weight).sum())
            loss = loss + config.kl_loss_coef * kl
        return loss, metrics


def mismatch(log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> dict[str, Metric]:
    """How far the trainer's log-probs of sampled tokens are from the rollout engine's own; all (T,)."""
    probs = (log_probs.exp() - rollout_log_probs.exp()).abs()
    gap = (log_probs - rollout_log_probs).abs()
    return {
        "training/rollout_probs_diff_mean": Metric.token_mean(probs, mask),
        "training/rollout_probs_diff_max": masked_extreme(probs, mask, "max"),
        "training/rollout_log_probs_diff_mean": Metric.token_mean(gap, mask),
        "training/rollout_log_probs_diff_max": masked_extreme(gap, mask, "max"),
    }
