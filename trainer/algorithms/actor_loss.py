"""The actor's whole loss: policy loss, less the entropy bonus, plus the KL to the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.schema.ppo import ActorConfig, PPOConfig, RolloutCorrectionConfig
from trainer.algorithms import kl
from trainer.algorithms.correction import is_enabled, mismatch, rollout_correction
from trainer.algorithms.policy_losses import POLICY_LOSSES, PolicyLossFn, PolicyLossInputs
from workers.batch import Batch
from workers.metric import Metric, Metrics


@dataclass(frozen=True, slots=True)
class ActorLossConfig:
    """policy_loss: the function itself, so that one from a user's file reaches every worker. needs, prepare: what it was
    registered with. own_old_log_probs: this is the only update from a policy that is still the old one, so that its own
    log-probs are the old ones.
    """

    actor: ActorConfig
    correction: RolloutCorrectionConfig
    policy_loss: PolicyLossFn
    needs: frozenset[str]
    prepare: Callable[..., Tensor] | None
    own_old_log_probs: bool

    @classmethod
    def of(cls, config: PPOConfig, *, own_old_log_probs: bool) -> ActorLossConfig:
        actor, correction = config.actor_rollout_ref.actor, config.algorithm.rollout_correction
        by_weights = correction.bypass_mode and correction.loss_type == "reinforce"
        name = "reinforce" if by_weights else actor.policy_loss.loss_mode
        return cls(
            actor, correction, POLICY_LOSSES[name], POLICY_LOSSES.needs(name), POLICY_LOSSES.prepare(name), own_old_log_probs
        )


class ActorLoss:
    """The factory that a LossSpec names. Reads ``columns`` and response_mask, loss_weight: all (T,).

    Where no other call does it, the mismatch with the rollout's log-probs is measured here.
    """

    def __init__(self, config: ActorLossConfig) -> None:
        self.config = config
        actor, correction = config.actor, config.correction
        self.wants_entropy = actor.entropy_coeff != 0.0 or actor.calculate_entropy
        self.kl_column = kl.columns(actor.kl_loss_type) if actor.use_kl_loss else None
        needs = {"log_probs", "entropy" if self.wants_entropy else "sampled_entropy"}
        self.needs = frozenset(needs | ({self.kl_column} if self.kl_column else set()))
        # In bypass mode the weights and rejections come from the policy as it is, not as it was before the updates.
        self.corrects_afresh = correction.bypass_mode and is_enabled(correction)
        self.weights_afresh = self.corrects_afresh and correction.loss_type == "reinforce" and correction.rollout_is is not None
        self.wants_preparation = config.prepare is not None or self.corrects_afresh
        self.columns = (
            "advantages",
            "rollout_log_probs" if config.own_old_log_probs else "old_log_probs",
            *([f"ref_{self.kl_column}"] if self.kl_column else []),
            *(["is_weights"] if self.weights_afresh or (correction.rollout_is and not correction.bypass_mode) else []),
            *(["chosen"] if config.prepare is not None else []),
            *(["entropy_mask"] if not self.wants_entropy else []),
        )

    def prepare(self, mini_batch: Batch, generator: torch.Generator) -> tuple[Batch, dict[str, float]]:
        """The whole mini-batch, before it is split, with what only the whole can tell; and metrics.

        Reads fresh log_probs, without gradient. Writes chosen, is_weights, and response_mask where tokens are rejected.
        """
        tokens, metrics = mini_batch.tokens, {}
        old_log_probs = tokens["log_probs"] if self.config.own_old_log_probs else tokens["old_log_probs"]
        written: dict[str, Tensor] = {}
        if self.corrects_afresh:
            correction = rollout_correction(
                tokens["log_probs"], old_log_probs, tokens["response_mask"], mini_batch.lengths, self.config.correction
            )
            written["response_mask"], metrics = correction.mask, correction.metrics
            if self.weights_afresh:
                assert correction.weights is not None
                written["is_weights"] = correction.weights
        if self.config.prepare is not None:
            inputs = self._inputs(mini_batch.with_tokens(**written), tokens["log_probs"], old_log_probs)
            written["chosen"] = self.config.prepare(inputs, self.config.actor, generator)
        return mini_batch.with_tokens(**written), metrics

    def __call__(self, outputs: dict[str, Tensor], micro_batch: Batch) -> tuple[Tensor, Metrics]:
        config, tokens = self.config.actor, micro_batch.tokens
        mask, weight, log_probs = tokens["response_mask"], tokens["loss_weight"], outputs["log_probs"]
        old_log_probs = log_probs.detach() if self.config.own_old_log_probs else tokens["old_log_probs"]
        metrics: Metrics = {}
        inputs = self._inputs(micro_batch, log_probs, old_log_probs)
        loss, told = self.config.policy_loss(inputs, config)
        metrics |= told
        if self.config.own_old_log_probs or self.config.correction.bypass_mode:
            drawn_with = tokens["rollout_log_probs"] if self.config.own_old_log_probs else old_log_probs
            metrics |= mismatch(log_probs.detach(), drawn_with, mask)
        if "is_weights" in tokens:
            loss = loss * importance(inputs, tokens["is_weights"], self.config.needs)
        metrics["actor/pg_loss"] = Metric.sum((loss.detach() * weight).sum())
        if self.wants_entropy:
            metrics["actor/entropy"] = Metric.token_mean(outputs["entropy"], mask)
            loss = loss - config.entropy_coeff * outputs["entropy"]
        elif (sampled := tokens["entropy_mask"] * mask).any():
            metrics["actor/entropy"] = Metric.token_mean(outputs["sampled_entropy"], sampled)
        if self.kl_column is not None:
            estimate = kl.kl_estimate(config.kl_loss_type, outputs[self.kl_column], tokens[f"ref_{self.kl_column}"])
            metrics["actor/kl_loss"] = Metric.sum((estimate.detach() * weight).sum())
            loss = loss + config.kl_loss_coef * estimate
        return loss, metrics

    def _inputs(self, batch: Batch, log_probs: Tensor, old_log_probs: Tensor) -> PolicyLossInputs:
        return PolicyLossInputs(
            log_probs=log_probs,
            old_log_probs=old_log_probs,
            advantages=batch.tokens["advantages"],
            response_mask=batch.tokens["response_mask"],
            lengths=batch.lengths,
            chosen=batch.tokens.get("chosen"),
        )


def entropy_mask(response_mask: Tensor) -> Tensor:
    """A sixteenth of the trained tokens (T,), bool: every token of the batch by its number n among them, where frac(n * golden
    ratio) < 1/16. Evenly spread, whatever period lengths have; the same however the batch is cut."""
    number = response_mask.bool().cumsum(0) - 1
    return response_mask.bool() & (number * 2654435769 % 2**32 < 2**28)


def importance(inputs: PolicyLossInputs, is_weights: Tensor, needs: frozenset[str]) -> Tensor:
    """What multiplies each token's policy loss (T,): its weight, or for a loss of whole answers (needs={"row_weights"}) the
    geometric mean of the answer's."""
    return inputs.row_mean((is_weights + 1e-10).log()).exp() if "row_weights" in needs else is_weights
