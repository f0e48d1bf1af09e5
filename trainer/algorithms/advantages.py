"""Advantage estimators: token rewards to advantages and returns. docs/algorithms.md compares them.

To add one: write a function (AdvantageInputs, AlgorithmConfig) -> Advantages and register it under the name that
`algorithm.adv_estimator` will take, here or in a file of your own (`algorithm.adv_estimator=my.py:mine`). ``needs`` brings
what it reads beyond the rewards: {"values"} a critic, {"baselines"} a greedy answer to each prompt, {"sum_pi_squared"} that
and old_log_probs.

The score of an answer, R below, is the sum of all its token rewards. A group is the answers to one prompt, ``uid``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.schema.ppo import AlgorithmConfig
from trainer.algorithms.registry import Registry
from trainer.algorithms.segments import discounted_to_come, group_ids, row_ids, sum_by, whiten


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """token_rewards, response_mask (T,). lengths (B,). prompt_lengths (B,): where each answer starts. uid (B,): prompt group.

    values (T,): V of the state before each token. last_value (B,): V after the last token of answers that were cut and are
    to be bootstrapped, else 0. baselines (B,): score of the prompt's greedy answer. rewards: {name: (B,)}, the named
    parts of the score. old_log_probs, sum_pi_squared (T,): of the policy, sum over the vocabulary of pi^2. is_weights
    (T,): of the rollout correction, if there is one.
    """

    token_rewards: Tensor
    response_mask: Tensor
    lengths: Tensor
    prompt_lengths: Tensor
    uid: Tensor
    values: Tensor | None = None
    last_value: Tensor | None = None
    baselines: Tensor | None = None
    rewards: Mapping[str, Tensor] | None = None
    old_log_probs: Tensor | None = None
    sum_pi_squared: Tensor | None = None
    is_weights: Tensor | None = None

    @property
    def trained(self) -> Tensor:
        return self.response_mask.bool()

    def rows(self) -> Tensor:
        """The row of each token (T,)."""
        return row_ids(self.lengths)

    def scores(self) -> Tensor:
        """R of each answer, float64 (B,)."""
        return sum_by(self.token_rewards, self.rows(), len(self.lengths))

    def trained_counts(self) -> Tensor:
        """Trained tokens of each answer, int64 (B,)."""
        return torch.bincount(self.rows()[self.trained], minlength=len(self.lengths))

    def outcome(self, per_row: Tensor) -> "Advantages":
        """One number an answer (B,), at each of its trained tokens: advantage and return."""
        spread = per_row[self.rows()].to(self.token_rewards.dtype) * self.response_mask
        return Advantages(spread, spread)

    def spread(self, values: Tensor) -> Tensor:
        """``values`` of the trained tokens, in place, 0 elsewhere: (T,)."""
        out = torch.zeros_like(self.token_rewards)
        out[self.trained] = values.to(out.dtype)
        return out


@dataclass(frozen=True, slots=True)
class Advantages:
    """Both (T,), zero outside response_mask."""

    advantages: Tensor
    returns: Tensor


AdvantageFn = Callable[[AdvantageInputs, AlgorithmConfig], Advantages]
ADVANTAGES: Registry[AdvantageFn] = Registry("algorithm.adv_estimator")


# With a critic


@ADVANTAGES.register("gae", needs={"values"})
def gae(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438, eq. 11 and 16), whitened.

    delta_t = r_t + gamma V(s_t+1) - V(s_t);  A_t = sum_l (gamma lam)^l delta_t+l;  returns = A + V (before whitening).
    Tokens outside response_mask are skipped, not discounted: the next token is the next one that is trained.
    V after the last trained token is last_value where it is given, else 0.
    """
    assert inputs.values is not None, "gae needs values"
    rewards, values = inputs.token_rewards[inputs.trained].double(), inputs.values[inputs.trained].double()
    counts = inputs.trained_counts()
    next_values = values.roll(-1)
    last_value = torch.zeros(len(counts)) if inputs.last_value is None else inputs.last_value
    next_values[counts.cumsum(0)[counts > 0] - 1] = last_value[counts > 0].double()
    deltas = rewards + config.gamma * next_values - values
    advantages = discounted_to_come(deltas, counts, config.gamma * config.lam)
    return Advantages(inputs.spread(whiten(advantages)), inputs.spread(advantages + values))


# Without one: rewards to come


@ADVANTAGES.register("reinforce")
def reinforce(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """The discounted reward to come, no baseline (Williams 1992, doi:10.1007/BF00992696; Sutton & Barto 2018, section 13.3)."""
    returns = inputs.spread(_rewards_to_come(inputs, config.gamma))
    return Advantages(returns, returns)


@ADVANTAGES.register("reinforce_plus_plus")
def reinforce_plus_plus(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """The discounted reward to come, whitened over all tokens of the batch (Hu 2025, arXiv:2501.03262, REINFORCE++)."""
    returns = _rewards_to_come(inputs, config.gamma)
    return Advantages(inputs.spread(whiten(returns)), inputs.spread(returns))


@ADVANTAGES.register("remax", needs={"baselines"})
def remax(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """The reward to come less the score of the prompt's greedy answer (Li et al. 2023, arXiv:2310.10505, algorithm 1)."""
    assert inputs.baselines is not None, "remax needs baselines"
    returns = _rewards_to_come(inputs, 1.0)
    return Advantages(inputs.spread(returns - inputs.baselines[inputs.rows()[inputs.trained]].double()), inputs.spread(returns))


# Without one: answers to the same prompt


@ADVANTAGES.register("grpo")
def grpo(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """Group-relative advantages (Shao et al. 2024, arXiv:2402.03300, section 4.1.2).

    A = (R - mean(R of the group)) / (std(R of the group) + 1e-6), the sample's standard deviation (n - 1).
    norm_adv_by_std_in_grpo=false leaves it out: Dr.GRPO (Liu et al. 2025, arXiv:2503.20783). A group of one has nothing to
    compare with: its mean counts as 0 and its deviation as 1. Equal scores: exactly 0.
    """
    return inputs.outcome(_group_normalised(inputs.scores(), inputs.uid, by_std=config.norm_adv_by_std_in_grpo))


@ADVANTAGES.register("grpo_passk")
def grpo_passk(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """Only the best answer of a group learns, by how far it is ahead of the second (Tang et al. 2025, arXiv:2503.19595,
    with k = n).

    A = (R_1 - R_2) / (std + 1e-6) for the best, 0 for the others; without std if norm_adv_by_std_in_grpo=false. A tie for
    the best, and a group of one, teach nothing: 0.
    """
    scores = inputs.scores()
    group, size = group_ids(inputs.uid)
    order = torch.argsort(scores, descending=True, stable=True)
    order = order[torch.argsort(group[order], stable=True)]  # groups side by side, the best first
    first = torch.nn.functional.pad(size.cumsum(0), (1, 0))[:-1]
    several = size > 1
    best, second = order[first[several]], order[first[several] + 1]
    ahead = scores[best] - scores[second]
    if config.norm_adv_by_std_in_grpo:
        ahead = ahead / (_group_std(scores, group, size)[several] + 1e-6)
    return inputs.outcome(torch.zeros_like(scores).index_copy(0, best, ahead))


@ADVANTAGES.register("rloo")
def rloo(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """R less the mean of the group's other scores (Ahmadian et al. 2024, arXiv:2402.14740): n / (n - 1) (R - mean).

    A group of one keeps its score.
    """
    group, size = group_ids(inputs.uid)
    n = size[group].double()
    return inputs.outcome(_centered(inputs.scores(), group, size) * torch.where(n > 1, n / (n - 1), 1.0))


@ADVANTAGES.register("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """R less the group's mean, whitened over all tokens of the batch (Hu 2025, arXiv:2501.03262, REINFORCE++-baseline).

    A group of one keeps its score, until the whitening.
    """
    centered = _centered(inputs.scores(), *group_ids(inputs.uid))
    advantages = inputs.spread(whiten(centered[inputs.rows()[inputs.trained]]))
    return Advantages(advantages, advantages)


@ADVANTAGES.register("opo")
def opo(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """R less the group's mean weighted by length, the baseline of least variance if each token's gradient is as large as
    another's (Hao et al. 2025, arXiv:2505.23585): b = sum(n_i R_i) / sum(n_i), n_i trained tokens.

    A group of one keeps its score.
    """
    scores, lengths = inputs.scores(), inputs.trained_counts().double()
    group, size = group_ids(inputs.uid)
    baseline = sum_by(lengths * scores, group, len(size)) / sum_by(lengths, group, len(size)).clamp(min=1.0)
    return inputs.outcome(scores - torch.where(size > 1, baseline, 0.0)[group])


@ADVANTAGES.register("gpg")
def gpg(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """alpha (R - the group's mean), alpha = B / (answers whose score is not 0) (Chu et al. 2025, arXiv:2504.02546).

    A group of one keeps its score. No score but 0: alpha is B, and all advantages are 0.
    """
    scores = inputs.scores()
    alpha = len(scores) / (scores != 0).sum().clamp(min=1)
    return inputs.outcome(alpha * _centered(scores, *group_ids(inputs.uid)))


@ADVANTAGES.register("gdpo", needs={"rewards"})
def gdpo(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """Each named reward is normalised in its group as GRPO does, then weighted and added, then whitened over all tokens, so
    that no reward drowns another (Liu et al. 2026, arXiv:2601.05242).

    The names are algorithm.gdpo_reward_keys, the weights algorithm.gdpo_reward_weights (null: 1 each).
    """
    assert inputs.rewards, "gdpo needs named rewards"
    names = config.gdpo_reward_keys or list(inputs.rewards)
    weights = config.gdpo_reward_weights or [1.0] * len(names)
    if len(weights) != len(names):
        raise ValueError(f"algorithm.gdpo_reward_weights: {len(weights)} weights for {len(names)} rewards, {', '.join(names)}")
    total = torch.zeros(len(inputs.lengths), dtype=torch.float64)
    for name, weight in zip(names, weights, strict=True):
        total += weight * _group_normalised(inputs.rewards[name].double(), inputs.uid, by_std=config.norm_adv_by_std_in_grpo)
    advantages = inputs.spread(whiten(total[inputs.rows()[inputs.trained]]))
    return Advantages(advantages, advantages)


@ADVANTAGES.register("optimal_token_baseline", needs={"sum_pi_squared"})
def optimal_token_baseline(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """The reward to come less, at each position of the answers, the group's mean weighted by the path's variance.

    G_t = reward to come;  W_t = sum_{j<=t} w_j with w = 1 - 2 pi(y_j) + sum_v pi(v)^2, the squared norm of the score
    function in the logits;  b_t = sum_i G_it W_it / sum_i W_it over the answers trained at position t (the optimal
    baseline: Greensmith et al. 2004, JMLR 5, theorem 8; per token as in verl 0.9.1). With a rollout correction w is
    multiplied by the square of its weight. A group of one, and the end of the longest answer that no other reaches: b = 0.
    """
    assert inputs.old_log_probs is not None and inputs.sum_pi_squared is not None
    trained = inputs.trained
    rows = inputs.rows()[trained]
    counts = inputs.trained_counts()
    starts = torch.nn.functional.pad(inputs.lengths.cumsum(0), (1, 0))[:-1] + inputs.prompt_lengths
    position = torch.arange(len(trained))[trained] - starts[rows]
    to_come = _rewards_to_come(inputs, 1.0)

    variance = 1 - 2 * inputs.old_log_probs[trained].double().exp() + inputs.sum_pi_squared[trained].double()
    if inputs.is_weights is not None:
        variance = variance * inputs.is_weights[trained].double().square()
    total = variance.cumsum(0)
    before = torch.nn.functional.pad(total, (1, 0))[torch.nn.functional.pad(counts.cumsum(0), (1, 0))[:-1]]
    path = total - before[rows]

    group, size = group_ids(inputs.uid)
    place = group[rows] * (int(position.max()) + 1 if len(position) else 1) + position
    _, place = torch.unique(place, return_inverse=True)
    n_places = int(place.max()) + 1 if len(place) else 0
    baseline = (sum_by(to_come * path, place, n_places) / (sum_by(path, place, n_places) + 1e-8))[place]

    longest, second = torch.zeros(2, len(size), dtype=torch.int64)
    longest = longest.scatter_reduce(0, group, counts, "amax")
    is_longest = counts == longest[group]
    alone = sum_by(is_longest, group, len(size)) == 1
    second = second.scatter_reduce(0, group, torch.where(is_longest & alone[group], 0, counts), "amax")
    beyond = (is_longest & alone[group])[rows] & (position >= second[group[rows]])
    baseline = torch.where((size[group[rows]] > 1) & ~beyond, baseline, 0.0)
    return Advantages(inputs.spread(to_come - baseline), inputs.spread(to_come))


def _rewards_to_come(inputs: AdvantageInputs, gamma: float) -> Tensor:
    """At the trained tokens; those between are skipped, not discounted."""
    return discounted_to_come(inputs.token_rewards[inputs.trained], inputs.trained_counts(), gamma)


def _centered(scores: Tensor, group: Tensor, size: Tensor) -> Tensor:
    """scores (B,) less their group's mean; a group of one keeps its score."""
    mean = sum_by(scores, group, len(size)) / size
    return torch.where(size[group] > 1, scores - mean[group], scores)


def _group_std(scores: Tensor, group: Tensor, size: Tensor) -> Tensor:
    """The sample's standard deviation of each group (G,); 1 for a group of one."""
    squares = sum_by(_centered(scores, group, size).square(), group, len(size))
    return torch.where(size > 1, (squares / (size - 1).clamp(min=1)).sqrt(), 1.0)


def _group_normalised(scores: Tensor, uid: Tensor, *, by_std: bool) -> Tensor:
    group, size = group_ids(uid)
    centered = _centered(scores, group, size)
    return centered / (_group_std(scores, group, size)[group] + 1e-6) if by_std else centered
