"""Policy losses: the unweighted loss of each token. docs/algorithms.md compares them.

To add one: write a function (PolicyLossInputs, ActorConfig) -> (loss (T,), metrics) and register it under the name that
`actor_rollout_ref.actor.policy_loss.loss_mode` takes, here or in a file of your own (`loss_mode=my.py:mine`). Aggregation over
tokens is separate (weights.py), so every loss works with every loss_agg_mode. Importance weights of the rollout correction
are multiplied afterwards. A loss that needs statistics of the whole mini-batch also registers a ``prepare`` step. A loss that
computes with a whole response, such as a sequence ratio, declares needs={"trajectory"}: a response of several rows is then in one
micro-batch, and the loss gets it as one row.

In the equations x is log pi - log pi_old, and ratio exp(x). x is clamped to +-20, as in verl; where verl does not clamp, to
+-80, the range in which exp fits float32.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.schema.ppo import ActorConfig
from trainer.algorithms.registry import Registry
from trainer.algorithms.segments import row_ids, sum_by
from workers.metric import Metric, Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossInputs:
    """Flat inputs of a policy loss; rows are never split.

    log_probs (with gradient), old_log_probs, advantages, response_mask (T,). lengths (B,). chosen (T,): the tokens selected by
    the loss's ``prepare`` step, 1 or 0; None for a loss without one. whole: rows are trajectories; always true for a loss with
    needs={"trajectory"}, for others false where rows may be parts of trajectories (trajectories.py).
    """

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    response_mask: Tensor
    lengths: Tensor
    chosen: Tensor | None = None
    whole: bool = True

    def log_ratio(self, bound: float = 20.0) -> Tensor:
        """x (T,), clamped to +-bound; 0 outside the mask, where columns may hold any value."""
        return torch.where(self.response_mask.bool(), self.log_probs - self.old_log_probs, 0.0).clamp(-bound, bound)

    def row_mean(self, values: Tensor) -> Tensor:
        """Mean of ``values`` (T,) over each row's trained tokens, broadcast to every token of the row: (T,), differentiable.

        Raises ValueError for parts of trajectories.
        """
        if not self.whole:
            raise ValueError(
                f"{POLICY_LOSSES.key}: the loss computes a mean over each response, and rows of this batch are parts of a "
                'response; register it with needs={"trajectory"}'
            )
        # Exact under any split into micro-batches: a row is never split.
        rows = row_ids(self.lengths.to(values.device))
        count = sum_by(self.response_mask, rows, len(self.lengths)).clamp(min=1.0)
        mean = sum_by(torch.where(self.response_mask.bool(), values, 0.0), rows, len(self.lengths)) / count
        return mean[rows].to(values.dtype)


PolicyLossFn = Callable[[PolicyLossInputs, ActorConfig], tuple[Tensor, Metrics]]
POLICY_LOSSES: Registry[PolicyLossFn] = Registry("actor_rollout_ref.actor.policy_loss.loss_mode")


@POLICY_LOSSES.register("vanilla")
def vanilla(inputs: PolicyLossInputs, config: ActorConfig) -> tuple[Tensor, Metrics]:
    """Clipped surrogate (PPO: Schulman et al. 2017, arXiv:1707.06347, eq. 7) with dual clip.

    L = max(-A ratio, -A clip(ratio, 1 - low, 1 + high));  where A < 0: min(L, -A c). Separate bounds low and high are
    clip-higher (Yu et al. 2025, arXiv:2503.14476, eq. 10); c is the dual clip (Ye et al. 2020, arXiv:1912.09729, eq. 5).
    """
    advantages, log_ratio = inputs.advantages, inputs.log_ratio()
    ratio = log_ratio.exp()
    unclipped, clipped = -advantages * ratio, -advantages * _clip(ratio, config)
    surrogate = torch.maximum(unclipped, clipped)
    # For A < 0 the surrogate grows without limit with the ratio: an outlier would dominate the gradient. c bounds it.
    bound = -advantages * config.clip_ratio_c
    loss = torch.where(advantages < 0, torch.minimum(surrogate, bound), surrogate)
    return loss, _metrics(inputs, log_ratio, clipped > unclipped, (surrogate > bound) & (advantages < 0))


@POLICY_LOSSES.register("gspo", needs={"trajectory"})
def gspo(inputs: PolicyLossInputs, config: ActorConfig) -> tuple[Tensor, Metrics]:
    """Clipped surrogate of the sequence ratio (Zheng et al. 2025, arXiv:2507.18071, GSPO-token).

    s = exp(mean of x over the response's tokens), at most e^10; its value is the same for all tokens of a response, its
    gradient flows through each token's own log-prob.  L = max(-A s, -A clip(s, 1 - low, 1 + high)).
    """
    log_probs, log_ratio = inputs.log_probs, inputs.log_ratio(80.0)
    # log_probs - log_probs.detach() is 0 and carries the token's gradient; the row mean carries the value and no gradient.
    ratio = (log_probs - log_probs.detach() + inputs.row_mean(log_ratio).detach()).clamp(max=10.0).exp()
    unclipped, clipped = -inputs.advantages * ratio, -inputs.advantages * _clip(ratio, config)
    return torch.maximum(unclipped, clipped), _metrics(inputs, log_ratio, clipped > unclipped)


@POLICY_LOSSES.register("cispo")
def cispo(inputs: PolicyLossInputs, config: ActorConfig) -> tuple[Tensor, Metrics]:
    """CISPO: the clipped ratio as a detached weight, so that clipped tokens keep a gradient (MiniMax 2025, arXiv:2506.13585).

    L = -sg(clip(ratio, 1 - low, 1 + high)) A log pi.
    """
    log_ratio = inputs.log_ratio()
    ratio = log_ratio.exp()
    clipped = _clip(ratio, config)
    return -clipped.detach() * inputs.advantages * inputs.log_probs, _metrics(inputs, log_ratio, clipped != ratio)


@POLICY_LOSSES.register("sapo")
def sapo(inputs: PolicyLossInputs, config: ActorConfig) -> tuple[Tensor, Metrics]:
    """SAPO: a sigmoid gate instead of the clip (Gao et al. 2025, arXiv:2511.20347).

    L = -A 4 / tau sigmoid(tau (ratio - 1)), tau = tau_pos where A > 0, else tau_neg.
    """
    log_ratio = inputs.log_ratio()
    tau = torch.where(inputs.advantages > 0, config.tau_pos, config.tau_neg).to(log_ratio.dtype)
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1.0)) * (4.0 / tau)
    # The gate is smooth: no token counts as clipped.
    return -gate * inputs.advantages, _metrics(inputs, log_ratio, torch.zeros_like(gate))


@POLICY_LOSSES.register("geo_mean", needs={"row_weights", "trajectory"})
def geo_mean(inputs: PolicyLossInputs, config: ActorConfig) -> tuple[Tensor, Metrics]:
    """GMPO: geometric mean of the response's ratios, clipped per token (Zhao et al. 2025, arXiv:2507.20673).

    In log space y = sign(A) min(sign(A) x, sign(A) clip(x, -low, high)).  L = -(mean of A over the response) exp(mean of y).
    """
    log_ratio, sign = inputs.log_ratio(80.0), inputs.advantages.sign()
    clipped = log_ratio.clamp(-config.clip_ratio_low, config.clip_ratio_high)
    chosen = sign * torch.minimum(sign * log_ratio, sign * clipped)
    loss = -inputs.row_mean(inputs.advantages) * inputs.row_mean(chosen).exp()
    is_clipped = clipped != log_ratio
    return loss, _metrics(inputs, log_ratio, is_clipped & (inputs.advantages > 0), is_clipped & (inputs.advantages < 0))


@POLICY_LOSSES.register("gpg")
def gpg(inputs: PolicyLossInputs, config: ActorConfig) -> tuple[Tensor, Metrics]:
    """L = -A log pi, for use with adv_estimator=gpg (Chu et al. 2025, arXiv:2504.02546)."""
    return -inputs.log_probs * inputs.advantages, {}


@POLICY_LOSSES.register("reinforce")
def reinforce(inputs: PolicyLossInputs, config: ActorConfig) -> tuple[Tensor, Metrics]:
    """Plain policy gradient (Williams 1992, doi:10.1007/BF00992696): L = -A log pi."""
    kl = Metric.token_mean(-inputs.log_ratio(80.0), inputs.response_mask)
    return -inputs.log_probs * inputs.advantages, {"actor/ppo_kl": kl}


@POLICY_LOSSES.register("dppo_tv")
def dppo_tv(inputs: PolicyLossInputs, config: ActorConfig) -> tuple[Tensor, Metrics]:
    """DPPO: trust region on the probability difference (Qi et al. 2026, arXiv:2602.04879, binary total variation).

    L = -A sg(min(ratio, c)) log pi, masked where the token has already moved too far in the direction of its advantage:
    pi - pi_old > high where A > 0, pi - pi_old < -low elsewhere. The paper recommends a large c, about 20.
    """
    moved = inputs.log_probs.exp() - inputs.old_log_probs.exp()
    return _dppo(inputs, config, moved <= config.clip_ratio_high, moved >= -config.clip_ratio_low)


@POLICY_LOSSES.register("dppo_kl")
def dppo_kl(inputs: PolicyLossInputs, config: ActorConfig) -> tuple[Tensor, Metrics]:
    """DPPO with a binary KL as the distance (Qi et al. 2026, arXiv:2602.04879): see dppo_tv.

    The KL is between Bernoulli distributions «this token or any other»: KL = p_old (log p_old - log p)
    + (1 - p_old) log((1 - p_old) / (1 - p)), with 1e-8 added to each 1 - p.
    """
    p, old = inputs.log_probs.exp(), inputs.old_log_probs.exp()
    kl = old * (inputs.old_log_probs - inputs.log_probs) + (1 - old) * torch.log((1.0 - old + 1e-8) / (1.0 - p + 1e-8))
    return _dppo(inputs, config, (kl <= config.clip_ratio_high) | (p <= old), (kl <= config.clip_ratio_low) | (p >= old))


def _dppo(inputs: PolicyLossInputs, config: ActorConfig, may_rise: Tensor, may_fall: Tensor) -> tuple[Tensor, Metrics]:
    log_ratio = inputs.log_ratio()
    # Detached: the gradient comes from log pi alone.
    ratio = log_ratio.exp().detach()
    valid = torch.where(inputs.advantages > 0, may_rise, may_fall)
    loss = -inputs.advantages * ratio.clamp(max=config.clip_ratio_c) * inputs.log_probs * valid
    return loss, _metrics(inputs, log_ratio, ~valid, (ratio > config.clip_ratio_c) & valid)


def choose_clip_cov(inputs: PolicyLossInputs, config: ActorConfig, generator: torch.Generator | None) -> Tensor:
    """Select the tokens of a whole mini-batch that clip_cov excludes: 1 or 0 (T,).

    cov = (A - mean A) (log pi - mean log pi), means over trained tokens. Candidates have clip_cov_lb < cov < clip_cov_ub and are
    not clipped by the surrogate. Among them clip_cov_ratio of the number of trained tokens, at least one, is sampled with
    ``generator``.
    """
    ratio = inputs.log_ratio(80.0).exp()
    clipped = -inputs.advantages * _clip(ratio, config) > -inputs.advantages * ratio
    cov = _covariance(inputs)
    trained, loss = inputs.response_mask.bool(), config.policy_loss
    candidates = (trained & ~clipped & (cov > loss.clip_cov_lb) & (cov < loss.clip_cov_ub)).nonzero()[:, 0]
    n = max(int(loss.clip_cov_ratio * int(trained.sum())), 1)
    # A seeded generator, once for the global mini-batch: the selection is independent of ranks and micro-batches.
    sampled = candidates[torch.randperm(len(candidates), generator=generator)[:n]]
    return torch.zeros_like(inputs.advantages).index_fill(0, sampled, 1.0)


@POLICY_LOSSES.register("clip_cov", prepare=choose_clip_cov)
def clip_cov(inputs: PolicyLossInputs, config: ActorConfig) -> tuple[Tensor, Metrics]:
    """Clipped surrogate without a sample of the tokens of large covariance (Cui et al. 2025, arXiv:2505.22617, Clip-Cov).

    Tokens with a large covariance of log-prob and advantage drive the collapse of entropy. Selection: choose_clip_cov.
    """
    assert inputs.chosen is not None
    log_ratio = inputs.log_ratio(80.0)
    ratio = log_ratio.exp()
    surrogate = torch.maximum(-inputs.advantages * ratio, -inputs.advantages * _clip(ratio, config))
    return surrogate * (1 - inputs.chosen), _metrics(inputs, log_ratio, inputs.chosen)


def choose_kl_cov(inputs: PolicyLossInputs, config: ActorConfig, generator: torch.Generator | None) -> Tensor:
    """Select the tokens of a whole mini-batch that kl_cov penalises: 1 or 0 (T,).

    These are the fraction kl_cov_ratio of trained tokens with the largest covariance (see choose_clip_cov), at least one.
    """
    trained = inputs.response_mask.bool().nonzero()[:, 0]
    n = min(max(int(config.policy_loss.kl_cov_ratio * len(trained)), 1), len(trained))
    largest = _covariance(inputs)[trained].topk(n).indices
    return torch.zeros_like(inputs.advantages).index_fill(0, trained[largest], 1.0)


@POLICY_LOSSES.register("kl_cov", prepare=choose_kl_cov)
def kl_cov(inputs: PolicyLossInputs, config: ActorConfig) -> tuple[Tensor, Metrics]:
    """Unclipped surrogate with a penalty on tokens of largest covariance (Cui et al. 2025, arXiv:2505.22617, KL-Cov).

    L = -A ratio + ppo_kl_coef |x| on the selected tokens. Selection: choose_kl_cov.
    """
    assert inputs.chosen is not None
    log_ratio = inputs.log_ratio(80.0)
    loss = -inputs.advantages * log_ratio.exp() + config.policy_loss.ppo_kl_coef * log_ratio.abs() * inputs.chosen
    return loss, {"actor/ppo_kl": Metric.token_mean(log_ratio.abs(), inputs.response_mask)}


def _covariance(inputs: PolicyLossInputs) -> Tensor:
    """(A - mean A) (log pi - mean log pi), means over trained tokens: (T,), no gradient."""
    trained = inputs.response_mask.bool()
    # No gradient: the covariance only selects tokens.
    advantages, log_probs = inputs.advantages, inputs.log_probs.detach()
    return (advantages - advantages[trained].mean()) * (log_probs - log_probs[trained].mean())


def _clip(ratio: Tensor, config: ActorConfig) -> Tensor:
    return ratio.clamp(1.0 - config.clip_ratio_low, 1.0 + config.clip_ratio_high)


def _metrics(inputs: PolicyLossInputs, log_ratio: Tensor, clipped: Tensor, clipped_lower: Tensor | None = None) -> Metrics:
    """Metrics common to the clipped losses. clipped_lower (T,): where a second bound applies; None for losses without one."""
    lower = torch.zeros_like(inputs.response_mask) if clipped_lower is None else clipped_lower
    return {
        "actor/pg_clipfrac": Metric.token_mean(clipped, inputs.response_mask),
        "actor/pg_clipfrac_lower": Metric.token_mean(lower, inputs.response_mask),
        "actor/ppo_kl": Metric.token_mean(-log_ratio, inputs.response_mask),
    }
