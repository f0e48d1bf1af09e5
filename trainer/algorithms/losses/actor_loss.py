"""Actor loss: policy loss, minus the entropy bonus, plus the KL penalty against the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from configs.schema.ppo import ActorConfig, PPOConfig, RolloutCorrectionConfig
from trainer.algorithms import kl
from trainer.algorithms.correction import is_enabled, micro_batch_weights, mismatch, rollout_correction
from trainer.algorithms.policy_losses import POLICY_LOSSES, PolicyLossFn, PolicyLossInputs
from trainer.algorithms.proximal import proximal_log_probs
from trainer.algorithms.trajectories import Trajectories
from workers.batch import Batch
from workers.engine.micro_batch import SAMPLED
from workers.metric import Metric, Metrics, Sample


@dataclass(frozen=True, slots=True)
class ActorLossConfig:
    """Frozen settings of ``ActorLoss``; pickled to every worker as part of a LossSpec.

    policy_loss: the function object, so that one defined in a user's file reaches every worker. needs, prepare: its
    registration. old_log_probs_from_update: the update is on-policy (one mini-batch, one epoch), so the log-probs of its own
    forward pass serve as the old log-probs. interpolates: old log-probs are interpolated in the update (proximal.py).
    """

    actor: ActorConfig
    correction: RolloutCorrectionConfig
    policy_loss: PolicyLossFn
    needs: frozenset[str]
    prepare: Callable[..., Tensor] | None
    old_log_probs_from_update: bool
    interpolates: bool = False

    @classmethod
    def of(cls, config: PPOConfig, *, old_log_probs_from_update: bool) -> ActorLossConfig:
        actor, correction = config.actor_rollout_ref.actor, config.algorithm.rollout_correction
        # loss_type=reinforce replaces the ratio of the clipped surrogate by detached importance weights, so loss_mode, which
        # would multiply a second ratio, does not apply.
        by_weights = correction.bypass_mode and correction.loss_type == "reinforce"
        name = "reinforce" if by_weights else actor.policy_loss.loss_mode
        return cls(
            actor,
            correction,
            POLICY_LOSSES[name],
            POLICY_LOSSES.needs(name),
            POLICY_LOSSES.prepare(name),
            old_log_probs_from_update,
            interpolates=config.async_training.prox_logp == "loglinear",
        )

    @property
    def needs_trajectory(self) -> bool:
        """Whether a micro-batch must have all rows of a trajectory."""
        # Weights by sequence are computed before the update otherwise, over the whole batch.
        return "trajectory" in self.needs or (self.interpolates and self.correction.rollout_is == "sequence")


class ActorLoss:
    """Token loss (T,) and metrics of the actor; the factory named by a LossSpec.

    Reads the token columns ``columns``, response_mask and loss_weight, all (T,); rows trajectory and part where a trajectory has
    several rows. Reports the mismatch between the trainer's and the rollout engine's log-probs when no separate log-prob pass
    does.
    """

    def __init__(self, config: ActorLossConfig) -> None:
        self.config = config
        actor, correction = config.actor, config.correction
        self.wants_entropy = actor.entropy_coeff != 0.0 or actor.calculate_entropy
        self.kl_column = kl.columns(actor.kl_loss_type) if actor.use_kl_loss else None
        needs = {"log_probs", "entropy" if self.wants_entropy else "sampled_entropy"}
        self.needs = frozenset(needs | ({self.kl_column} if self.kl_column else set()))
        # In bypass mode old_log_probs are the rollout's, so there is no correction to compute before the update: importance
        # weights and rejections follow the current policy and are recomputed for every mini-batch.
        self.recomputes_correction = correction.bypass_mode and is_enabled(correction)
        self.recomputes_weights = (
            self.recomputes_correction and correction.loss_type == "reinforce" and correction.rollout_is is not None
        )
        self.needs_preparation = config.prepare is not None or self.recomputes_correction
        if config.interpolates:
            old, has_weights = ["rollout_log_probs", "prox_alpha", "staleness"], False
        else:
            old = ["rollout_log_probs" if config.old_log_probs_from_update else "old_log_probs"]
            has_weights = self.recomputes_weights or (correction.rollout_is is not None and not correction.bypass_mode)
        self.columns = (
            "advantages",
            *old,
            *([f"ref_{self.kl_column}"] if self.kl_column else []),
            *(["is_weights"] if has_weights else []),
            *(["chosen"] if config.prepare is not None else []),
            *(["entropy_mask"] if not self.wants_entropy else []),
        )

    def prepare(self, mini_batch: Batch, generator: torch.Generator) -> tuple[Batch, dict[str, float]]:
        """Add the columns that need statistics of the whole mini-batch, before it is split; return it with metrics.

        Reads log_probs of the current policy, without gradient. Writes chosen, is_weights, and response_mask where tokens are
        rejected.
        """
        tokens, metrics = mini_batch.tokens, {}
        old_log_probs = self._old_log_probs(tokens["log_probs"], mini_batch)
        written: dict[str, Tensor] = {}
        # A mini-batch has all rows of its trajectories, whatever the loss declares.
        trajectories = Trajectories.of(mini_batch)
        if self.recomputes_correction:
            columns = (tokens["log_probs"], old_log_probs, tokens["response_mask"])
            current, rollout, mask = (trajectories.gather(column) for column in columns)
            correction = rollout_correction(current, rollout, mask, trajectories.lengths, self.config.correction)
            written["response_mask"], metrics = trajectories.split(correction.mask), correction.metrics
            if self.recomputes_weights:
                assert correction.weights is not None
                written["is_weights"] = trajectories.split(correction.weights)
        if self.config.prepare is not None:
            inputs = self._inputs(mini_batch.with_tokens(**written), trajectories, tokens["log_probs"], old_log_probs)
            # After the rejections: a rejected token must take no place among the chosen ones.
            written["chosen"] = trajectories.split(self.config.prepare(inputs, self.config.actor, generator))
        return mini_batch.with_tokens(**written), metrics

    def __call__(self, outputs: dict[str, Tensor], micro_batch: Batch) -> tuple[Tensor, Metrics]:
        config, tokens = self.config.actor, micro_batch.tokens
        mask, weight, log_probs = tokens["response_mask"], tokens["loss_weight"], outputs["log_probs"]
        old_log_probs = self._old_log_probs(log_probs, micro_batch)
        metrics: Metrics = {}
        joins = self.config.needs_trajectory
        trajectories = Trajectories.of(micro_batch) if joins else Trajectories.single_rows(micro_batch)
        inputs = self._inputs(micro_batch, trajectories, log_probs, old_log_probs)
        inputs = replace(inputs, whole=joins or "part" not in micro_batch.rows)
        loss, policy_metrics = _checked(self.config.policy_loss(inputs, config), inputs, config.policy_loss.loss_mode)
        metrics |= policy_metrics
        # Both cases skip the log-prob pass before the update, which measures the mismatch otherwise. In bypass mode the old
        # log-probs are those of the rollout.
        if self.config.old_log_probs_from_update or self.config.correction.bypass_mode:
            behavior = tokens["rollout_log_probs"] if self.config.old_log_probs_from_update else old_log_probs
            metrics |= mismatch(log_probs.detach(), behavior, mask)
        weights = trajectories.gather(tokens["is_weights"]) if "is_weights" in tokens else None
        if self.config.interpolates:
            behavior = trajectories.gather(tokens["rollout_log_probs"])
            weights, weight_metrics = micro_batch_weights(
                inputs.old_log_probs, behavior, inputs.response_mask, inputs.lengths, self.config.correction
            )
            metrics |= weight_metrics
            # As before an update: of tokens of the present weights, and only while theta has these.
            fresh = mask * (tokens["prox_alpha"] == 1) * (tokens["staleness"] == 0)
            if fresh.any():
                metrics |= mismatch(log_probs.detach(), tokens["rollout_log_probs"], fresh)
        if weights is not None:
            loss = loss * importance(inputs, weights, self.config.needs)
        loss = trajectories.split(loss)
        # A sum, not a mean: loss_weight already contains the aggregation mode's denominator over the global mini-batch, so
        # partial sums of micro-batches and ranks add up to the loss.
        metrics["actor/pg_loss"] = Metric.sum((loss.detach() * weight).sum())
        if self.wants_entropy:
            metrics["actor/entropy"] = Metric.token_mean(outputs["entropy"], mask)
            loss = loss - config.entropy_coeff * outputs["entropy"]
        elif _is_sampled(micro_batch):
            metrics["actor/entropy"] = Metric.token_mean(outputs["sampled_entropy"], tokens["entropy_mask"] * mask)
        if self.kl_column is not None:
            estimate = kl.kl_estimate(config.kl_loss_type, outputs[self.kl_column], tokens[f"ref_{self.kl_column}"])
            metrics["actor/kl_loss"] = Metric.sum((estimate.detach() * weight).sum())
            loss = loss + config.kl_loss_coef * estimate
        return loss, metrics

    def _old_log_probs(self, log_probs: Tensor, batch: Batch) -> Tensor:
        """Log-probs (T,) to which the loss takes its ratio. log_probs: of the current policy."""
        tokens = batch.tokens
        if self.config.interpolates:
            alpha, mask = tokens["prox_alpha"], tokens["response_mask"]
            return proximal_log_probs(log_probs, tokens["rollout_log_probs"], alpha, mask)
        return log_probs.detach() if self.config.old_log_probs_from_update else tokens["old_log_probs"]

    def _inputs(self, batch: Batch, trajectories: Trajectories, log_probs: Tensor, old_log_probs: Tensor) -> PolicyLossInputs:
        chosen = batch.tokens.get("chosen")
        return PolicyLossInputs(
            log_probs=trajectories.gather(log_probs),
            old_log_probs=trajectories.gather(old_log_probs),
            advantages=trajectories.gather(batch.tokens["advantages"]),
            response_mask=trajectories.gather(batch.tokens["response_mask"]),
            lengths=trajectories.lengths,
            chosen=None if chosen is None else trajectories.gather(chosen),
        )


def entropy_mask(response_mask: Tensor) -> Tensor:
    """Sample 1/16 of the trained tokens for the entropy metric: bool (T,).

    The n-th trained token of the batch is selected where frac(n * golden ratio) < 1/16 (Weyl sequence). The sample is evenly
    spread for any pattern of lengths, and computed before the split, hence independent of ranks and micro-batches.
    """
    trained = response_mask.bool()
    number = np.arange(int(trained.count_nonzero()), dtype=np.uint32)
    # Fixed point, modulo 2^32: 2654435769 = 2^32 / golden ratio, and 2^28 = 2^32 / 16. Integers, since a float32 n * ratio loses
    # its fraction.
    number *= np.uint32(2654435769)
    return trained.masked_scatter(trained, torch.from_numpy(number < 2**28).to(trained.device))


def _is_sampled(micro_batch: Batch) -> bool:
    """Whether the entropy of any of its tokens is measured. An engine knows that without waiting for its GPU."""
    if (places := micro_batch.meta.get(SAMPLED)) is not None:
        return len(places) > 0
    return bool((micro_batch.tokens["entropy_mask"] * micro_batch.tokens["response_mask"]).any())


def importance(inputs: PolicyLossInputs, is_weights: Tensor, needs: frozenset[str]) -> Tensor:
    """Factor of each token's policy loss (T,): its importance weight.

    For a sequence-level loss (needs={"row_weights"}) it is the geometric mean over the response.
    """
    # IcePop sets weights to 0, whose log is -inf; 1e-10 keeps the mean of the logs finite.
    return inputs.row_mean((is_weights + 1e-10).log()).exp() if "row_weights" in needs else is_weights


def _checked(found: Any, inputs: PolicyLossInputs, name: str) -> tuple[Tensor, Metrics]:
    """What a policy loss returned. Raises ValueError, one line, for an invalid result of a user's function."""
    returned = f"actor_rollout_ref.actor.policy_loss.loss_mode={name} returned"
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[0], Tensor) or not isinstance(found[1], dict):
        raise ValueError(f"{returned} a {type(found).__name__}; return (loss, metrics): the loss of each token (T,), and a dict")
    loss, metrics = found
    if loss.shape != inputs.log_probs.shape:
        # A mean would be multiplied by the weight of each token: the result would depend on how the batch is cut.
        raise ValueError(
            f"{returned} a loss {tuple(loss.shape)}; return that of each token, {tuple(inputs.log_probs.shape)}: loss_agg_mode "
            "weights and adds them"
        )
    for key, metric in metrics.items():
        if not isinstance(metric, Metric | Sample):
            raise ValueError(f"{returned} the metric {key} as {type(metric).__name__}; return Metric.token_mean(values, mask)")
    return loss, metrics
