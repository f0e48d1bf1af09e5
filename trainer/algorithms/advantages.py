"""Advantage estimators: token rewards to advantages and returns.

To add one: write a function (AdvantageInputs, AlgorithmConfig) -> Advantages and register it under the name that
`algorithm.adv_estimator` will take. ``needs={"values"}`` brings the critic.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.schema.ppo import AlgorithmConfig
from trainer.algorithms.registry import Registry


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """token_rewards (T,): zero outside response_mask. response_mask (T,). lengths (B,). uid (B,): prompt group.
    values (T,): V of the state before each token; only for estimators that need it.
    """

    token_rewards: Tensor
    response_mask: Tensor
    lengths: Tensor
    uid: Tensor
    values: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Advantages:
    """Both (T,), zero outside response_mask."""

    advantages: Tensor
    returns: Tensor


AdvantageFn = Callable[[AdvantageInputs, AlgorithmConfig], Advantages]
ADVANTAGES: Registry[AdvantageFn] = Registry("algorithm.adv_estimator")


@ADVANTAGES.register("gae", needs=frozenset({"values"}))
def gae(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438, eq. 11 and 16), whitened.

    delta_t = r_t + gamma V(s_t+1) - V(s_t);  A_t = sum_l (gamma lam)^l delta_t+l;  returns = A + V (before whitening).
    Tokens outside response_mask are skipped, not discounted: the next token is the next one that is trained.
    V after the last token is 0.
    """
    assert inputs.values is not None, "gae needs values"
    trained = inputs.response_mask.bool()
    rows = torch.repeat_interleave(torch.arange(len(inputs.lengths)), inputs.lengths)[trained]
    rewards, values = inputs.token_rewards[trained], inputs.values[trained]
    if not len(rows):
        zeros = torch.zeros_like(inputs.token_rewards)
        return Advantages(zeros, zeros)
    is_last = torch.ones_like(rows, dtype=torch.bool)
    is_last[:-1] = rows[1:] != rows[:-1]
    next_values = torch.where(is_last, 0.0, values.roll(-1))
    deltas = rewards + config.gamma * next_values - values

    # The recursion runs over rows at once, from each row's last trained token backwards.
    counts = torch.bincount(rows, minlength=len(inputs.lengths))
    last = counts.cumsum(0) - 1
    advantages = deltas.clone()
    for step in range(1, int(counts.max())):
        here = (last - step)[counts > step]
        advantages[here] += config.gamma * config.lam * advantages[here + 1]
    return Advantages(
        _spread(masked_whiten(advantages), trained),
        _spread(advantages + values, trained),
    )


@ADVANTAGES.register("grpo")
def grpo(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """Group-relative advantages (Shao et al. 2024, arXiv:2402.03300, section 4.1.2).

    A = (R - mean(R of the group)) / (std(R of the group) + 1e-6) for every token of an answer; R sums token rewards.
    The standard deviation is the sample's (n - 1). norm_adv_by_std_in_grpo=false leaves it out: Dr.GRPO (Liu et al. 2025,
    arXiv:2503.20783). A group of one has nothing to compare with: its advantage is R. Equal scores: 0.
    """
    segments = torch.repeat_interleave(torch.arange(len(inputs.lengths)), inputs.lengths)
    scores = sum_rows(inputs.token_rewards * inputs.response_mask, segments, len(inputs.lengths))
    _, group = torch.unique(inputs.uid, return_inverse=True)
    n_groups = int(group.max()) + 1 if len(group) else 0
    size = torch.bincount(group, minlength=n_groups)
    mean = sum_rows(scores, group, n_groups) / size
    centered = torch.where(size[group] > 1, scores - mean[group], scores)
    if config.norm_adv_by_std_in_grpo:
        variance = sum_rows(centered**2, group, n_groups) / (size - 1).clamp(min=1)
        std = torch.where(size > 1, variance.sqrt(), 1.0)
        centered = centered / (std[group] + 1e-6)
    advantages = centered[segments] * inputs.response_mask
    return Advantages(advantages, advantages)


def sum_rows(values: Tensor, segments: Tensor, n: int) -> Tensor:
    """Sums of ``values`` (T,) by ``segments`` (T,), in float64 so that the order of terms does not show: (n,)."""
    return torch.zeros(n, dtype=torch.float64).index_add_(0, segments, values.double()).to(values.dtype)


def masked_whiten(values: Tensor) -> Tensor:
    """Zero mean, unit sample variance over all entries (T,); a single entry becomes 0."""
    wide = values.double()
    variance = wide.var() if len(wide) > 1 else torch.zeros((), dtype=torch.float64)
    return ((wide - wide.mean()) * torch.rsqrt(variance + 1e-8)).to(values.dtype)


def _spread(values: Tensor, trained: Tensor) -> Tensor:
    """``values`` back at the trained tokens, 0 elsewhere: (T,)."""
    out = torch.zeros(len(trained), dtype=values.dtype)
    out[trained] = values
    return out
