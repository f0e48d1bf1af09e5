"""Advantage estimators: token rewards to advantages and returns. docs/algorithms.md compares them.

To add one: write a function (AdvantageInputs, AlgorithmConfig) -> Advantages and register it under the name that
`algorithm.adv_estimator` takes, here or in a file of your own (`algorithm.adv_estimator=my.py:mine`). ``needs`` requests
inputs beyond the rewards: {"values"} a critic, {"baselines"} a greedy response to each prompt, {"sum_pi_squared"} that
column and old_log_probs.

R below is the score of a response: the sum of all its token rewards. A group is the set of responses to one prompt.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from configs.schema.ppo import AlgorithmConfig
from trainer.algorithms.registry import Registry
from trainer.algorithms.segments import discounted_to_come, group_ids, row_ids, sum_by, sum_rows, whiten
from trainer.run.user_code import describe
from workers.batch import counts_in, repeat_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """Flat inputs of an estimator: B sequences, T tokens in total.

    token_rewards, response_mask (T,). lengths (B,). uid (B,): number of the group, rows["group"] of the batch. values (T,): V of
    the state before each token. last_value (B,): V after the last token of truncated responses that are bootstrapped, else 0.
    baselines (B,): score of the prompt's greedy response. rewards: {name: (B,)}, the named components of the score.
    old_log_probs (T,). sum_pi_squared (T,): sum over the vocabulary of pi^2. is_weights (T,): importance weights of the rollout
    correction, None without it.
    """

    token_rewards: Tensor
    response_mask: Tensor
    lengths: Tensor
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
        """Row index of each token (T,)."""
        return row_ids(self.lengths)

    def scores(self) -> Tensor:
        """R of each response, float64 (B,)."""
        return sum_rows(self.token_rewards, self.lengths)

    def trained_counts(self) -> Tensor:
        """Number of trained tokens of each response, int64 (B,)."""
        return counts_in(self.response_mask, self.lengths)

    def outcome(self, per_row: Tensor) -> "Advantages":
        """Broadcast one value per response (B,) to its trained tokens, as advantage and as return."""
        spread = repeat_rows(per_row.to(self.token_rewards.dtype), self.lengths) * self.response_mask
        return Advantages(spread, spread)

    def discount(self, factor: float, over: Literal["token", "turn"]) -> Tensor:
        """Factor between each trained token and what follows it, float64 (N,) for N trained tokens.

        over: "token": ``factor`` everywhere; "turn": ``factor`` after the last token of a turn, 1 within. A turn is a run of
        trained tokens without an untrained one in between.
        """
        place = self.trained.nonzero()[:, 0]
        factors = torch.full((len(place),), factor, dtype=torch.float64)
        if over == "turn":
            rows = self.rows()[place]
            # Neighbouring tokens of one row are in one turn; a hole or the end of the row ends it.
            factors[:-1][(place.diff() == 1) & (rows.diff() == 0)] = 1.0
        return factors

    def spread(self, values: Tensor) -> Tensor:
        """Scatter ``values`` of the trained tokens to their positions, 0 elsewhere: (T,)."""
        out = torch.zeros_like(self.token_rewards)
        out[self.trained] = values.to(out.dtype)
        return out


@dataclass(frozen=True, slots=True)
class Advantages:
    """Advantages and returns, both (T,), zero outside response_mask."""

    advantages: Tensor
    returns: Tensor


AdvantageFn = Callable[[AdvantageInputs, AlgorithmConfig], Advantages]
ADVANTAGES: Registry[AdvantageFn] = Registry("algorithm.adv_estimator")


def estimated(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """Advantages and returns by algorithm.adv_estimator. Raises ValueError, one line, for errors of a user's function."""
    try:
        found: Any = ADVANTAGES[config.adv_estimator](inputs, config)
    except Exception as error:  # a user's function may raise anything
        if ".py:" not in config.adv_estimator:
            raise
        raise ValueError(f"algorithm.adv_estimator={config.adv_estimator}: {describe(error)}") from error
    returned = f"algorithm.adv_estimator={config.adv_estimator} returned"
    if not isinstance(found, Advantages):
        raise ValueError(f"{returned} a {type(found).__name__}; return inputs.outcome(values) or Advantages(advantages, returns)")
    for name, column in (("advantages", found.advantages), ("returns", found.returns)):
        if not isinstance(column, Tensor) or column.shape != inputs.response_mask.shape or not column.is_floating_point():
            shape = f"a tensor {tuple(column.shape)} of {column.dtype}" if isinstance(column, Tensor) else type(column).__name__
            raise ValueError(f"{returned} {name} that are {shape}; one float of each token, {tuple(inputs.response_mask.shape)}")
    return found


# Estimators with a critic


@ADVANTAGES.register("gae", needs={"values"})
def gae(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438, eq. 11 and 16), whitened.

    delta_t = r_t + gamma V(s_t+1) - V(s_t);  A_t = sum_l (gamma lam)^l delta_t+l;  returns = A + V (before whitening).
    Tokens outside response_mask are skipped, not discounted: the next token is the next one that is trained.
    V after the last trained token is last_value if given, else 0. gamma_over=turn: gamma and lambda are 1 between tokens of a
    turn, so that all tokens of a turn have the same return, that of GAE over turns, and each its own V as baseline.
    """
    assert inputs.values is not None, "gae needs values"
    rewards, values = inputs.token_rewards[inputs.trained].double(), inputs.values[inputs.trained].double()
    counts = inputs.trained_counts()
    next_values = values.roll(-1)
    last_value = torch.zeros(len(counts)) if inputs.last_value is None else inputs.last_value
    # roll() moved the next row's first value to the end of each row; replace it. Rows without a trained token have no end.
    next_values[counts.cumsum(0)[counts > 0] - 1] = last_value[counts > 0].double()
    gamma = inputs.discount(config.gamma, config.gamma_over)
    deltas = rewards + gamma * next_values - values
    advantages = discounted_to_come(deltas, counts, inputs.discount(config.gamma * config.lam, config.gamma_over))
    # The critic regresses on the returns, which must keep the scale of V: they are taken before the whitening.
    return Advantages(inputs.spread(whiten(advantages)), inputs.spread(advantages + values))


# Estimators without a critic: reward to go


@ADVANTAGES.register("reinforce")
def reinforce(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """Discounted reward to go without baseline (Williams 1992, doi:10.1007/BF00992696; Sutton & Barto 2018, section 13.3)."""
    returns = inputs.spread(_discounted_rewards(inputs, config))
    return Advantages(returns, returns)


@ADVANTAGES.register("reinforce_plus_plus")
def reinforce_plus_plus(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """Discounted reward to go, whitened over all tokens of the batch (Hu 2025, arXiv:2501.03262, REINFORCE++)."""
    returns = _discounted_rewards(inputs, config)
    return Advantages(inputs.spread(whiten(returns)), inputs.spread(returns))


@ADVANTAGES.register("remax", needs={"baselines"})
def remax(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """Reward to go minus the score of the prompt's greedy response (Li et al. 2023, arXiv:2310.10505, algorithm 1)."""
    assert inputs.baselines is not None, "remax needs baselines"
    returns = _rewards_to_come(inputs)
    return Advantages(inputs.spread(returns - inputs.baselines[inputs.rows()[inputs.trained]].double()), inputs.spread(returns))


# Estimators without a critic: group statistics over responses to the same prompt


@ADVANTAGES.register("grpo")
def grpo(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """Group-relative advantages (Shao et al. 2024, arXiv:2402.03300, section 4.1.2).

    A = (R - mean(R of the group)) / (std(R of the group) + 1e-6), with the sample standard deviation (n - 1).
    norm_adv_by_std_in_grpo=false omits the division: Dr.GRPO (Liu et al. 2025, arXiv:2503.20783). A group of one uses mean 0
    and standard deviation 1. Equal scores give exactly 0.
    """
    return inputs.outcome(_group_normalised(inputs.scores(), inputs.uid, by_std=config.norm_adv_by_std_in_grpo))


@ADVANTAGES.register("grpo_passk")
def grpo_passk(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """Pass@k advantages with k = n: only the best response of a group (Tang et al. 2025, arXiv:2503.19595).

    A = (R_1 - R_2) / (std + 1e-6) for the best response, with R_2 the second-best score, 0 for the others; without the
    division if norm_adv_by_std_in_grpo=false. 0 for a tie at the top and for a group of one.
    """
    scores = inputs.scores()
    group, size = group_ids(inputs.uid)
    # Sort by score, then stably by group: each group becomes a contiguous run, best response first.
    order = torch.argsort(scores, descending=True, stable=True)
    order = order[torch.argsort(group[order], stable=True)]
    first = torch.nn.functional.pad(size.cumsum(0), (1, 0))[:-1]
    several = size > 1
    best, second = order[first[several]], order[first[several] + 1]
    ahead = scores[best] - scores[second]
    if config.norm_adv_by_std_in_grpo:
        ahead = ahead / (_group_std(scores, group, size)[several] + 1e-6)
    return inputs.outcome(torch.zeros_like(scores).index_copy(0, best, ahead))


@ADVANTAGES.register("rloo")
def rloo(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """Leave-one-out baseline (Ahmadian et al. 2024, arXiv:2402.14740): R - mean(other scores) = n / (n - 1) (R - mean).

    A group of one keeps its score.
    """
    group, size = group_ids(inputs.uid)
    n = size[group].double()
    return inputs.outcome(_centered(inputs.scores(), group, size) * torch.where(n > 1, n / (n - 1), 1.0))


@ADVANTAGES.register("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """R minus the group mean, whitened over all tokens of the batch (Hu 2025, arXiv:2501.03262, REINFORCE++-baseline).

    A group of one keeps its score before whitening.
    """
    centered = _centered(inputs.scores(), *group_ids(inputs.uid))
    advantages = inputs.spread(whiten(centered[inputs.rows()[inputs.trained]]))
    return Advantages(advantages, advantages)


@ADVANTAGES.register("opo")
def opo(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """R minus the length-weighted group mean (OPO: Hao et al. 2025, arXiv:2505.23585).

    b = sum(n_i R_i) / sum(n_i) with n_i trained tokens: the minimum-variance baseline if all tokens have gradients of equal
    norm. A group of one keeps its score.
    """
    scores, lengths = inputs.scores(), inputs.trained_counts().double()
    group, size = group_ids(inputs.uid)
    # clamp: the divisor of a group without a trained token is 0, and so is its numerator.
    baseline = sum_by(lengths * scores, group, len(size)) / sum_by(lengths, group, len(size)).clamp(min=1.0)
    return inputs.outcome(scores - torch.where(size > 1, baseline, 0.0)[group])


@ADVANTAGES.register("gpg")
def gpg(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """alpha (R - group mean), alpha = B / (responses with non-zero score) (Chu et al. 2025, arXiv:2504.02546).

    A group of one keeps its score. If all scores are 0, alpha is B and all advantages are 0.
    """
    scores = inputs.scores()
    alpha = len(scores) / (scores != 0).sum().clamp(min=1)
    return inputs.outcome(alpha * _centered(scores, *group_ids(inputs.uid)))


@ADVANTAGES.register("gdpo", needs={"rewards"})
def gdpo(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """GDPO: normalise each named reward per group, sum with weights, whiten over all tokens (Liu et al. 2026, arXiv:2601.05242).

    Per-reward normalisation prevents a reward of large variance from dominating. Names: algorithm.gdpo_reward_keys (null:
    all). Weights: algorithm.gdpo_reward_weights (null: 1 each). Raises ValueError if their numbers differ.
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
    """Reward to go minus a per-position baseline of least variance.

    The variance of a policy gradient is minimal for a baseline that weights each sample's return by the squared norm of its
    score function. That norm is available in closed form for the gradient with respect to the logits, from pi of the sampled
    token and sum_v pi(v)^2, so the baseline needs one extra column and no backward pass.

    G_t = reward to go;  W_t = sum_{j<=t} w_j with w = 1 - 2 pi(y_j) + sum_v pi(v)^2;  b_t = sum_i G_it W_it / sum_i W_it over
    the responses with a t-th trained token (optimal baseline: Greensmith et al. 2004, JMLR 5, theorem 8; per token as
    tir_optimal_token_baseline in verl 0.9.1). With a rollout correction w is multiplied by the squared importance weight. b = 0
    for a group of one, and for the tail of the longest response where no other response is left.
    """
    assert inputs.old_log_probs is not None and inputs.sum_pi_squared is not None
    trained = inputs.trained
    rows = inputs.rows()[trained]
    counts = inputs.trained_counts()
    first = counts.cumsum(0) - counts  # index of each row's first trained token among all trained tokens
    # Responses of a group are compared after the same number of sampled tokens, whatever was observed between them.
    position = torch.arange(len(rows)) - first[rows]
    to_come = _rewards_to_come(inputs)

    variance = 1 - 2 * inputs.old_log_probs[trained].double().exp() + inputs.sum_pi_squared[trained].double()
    if inputs.is_weights is not None:
        variance = variance * inputs.is_weights[trained].double().square()
    # Segmented cumulative sum: one cumsum over the flat batch, minus its value before each row's first trained token.
    total = variance.cumsum(0)
    before = torch.nn.functional.pad(total, (1, 0))[first]
    path = total - before[rows]

    # One segment per (group, position): its number is made dense by unique, so that sums run over flat tensors, unpadded.
    group, size = group_ids(inputs.uid)
    place = group[rows] * (int(position.max()) + 1 if len(position) else 1) + position
    _, place = torch.unique(place, return_inverse=True)
    n_places = int(place.max()) + 1 if len(place) else 0
    baseline = (sum_by(to_come * path, place, n_places) / (sum_by(path, place, n_places) + 1e-8))[place]

    # Beyond the second-longest response of a group a single sample is left, whose weighted mean is its own return: A would be 0
    # and the tail of the longest response would never be trained. The baseline is 0 there instead.
    longest, second = torch.zeros(2, len(size), dtype=torch.int64)
    longest = longest.scatter_reduce(0, group, counts, "amax")
    is_longest = counts == longest[group]
    alone = sum_by(is_longest, group, len(size)) == 1
    second = second.scatter_reduce(0, group, torch.where(is_longest & alone[group], 0, counts), "amax")
    beyond = (is_longest & alone[group])[rows] & (position >= second[group[rows]])
    baseline = torch.where((size[group[rows]] > 1) & ~beyond, baseline, 0.0)
    return Advantages(inputs.spread(to_come - baseline), inputs.spread(to_come))


def _discounted_rewards(inputs: AdvantageInputs, config: AlgorithmConfig) -> Tensor:
    """Discounted reward to go at the trained tokens; tokens between them are skipped, not discounted."""
    return _rewards_to_come(inputs, inputs.discount(config.gamma, config.gamma_over))


def _rewards_to_come(inputs: AdvantageInputs, factor: float | Tensor = 1.0) -> Tensor:
    return discounted_to_come(inputs.token_rewards[inputs.trained], inputs.trained_counts(), factor)


def _centered(scores: Tensor, group: Tensor, size: Tensor) -> Tensor:
    """scores (B,) minus their group mean, exactly 0 if all are equal; a group of one keeps its score."""
    # Subtract the minimum first: n equal scores s sum to n s with rounding, so s - mean would be a tiny number that the
    # division by the standard deviation (+ 1e-6) and Adam would amplify.
    lowest = scores.new_full((len(size),), torch.inf).scatter_reduce(0, group, scores, "amin")
    above = scores - lowest[group]
    mean = sum_by(above, group, len(size)) / size
    return torch.where(size[group] > 1, above - mean[group], scores)


def _group_std(scores: Tensor, group: Tensor, size: Tensor) -> Tensor:
    """Sample standard deviation of each group (G,); 1 for a group of one."""
    squares = sum_by(_centered(scores, group, size).square(), group, len(size))
    return torch.where(size > 1, (squares / (size - 1).clamp(min=1)).sqrt(), 1.0)


def _group_normalised(scores: Tensor, uid: Tensor, *, by_std: bool) -> Tensor:
    group, size = group_ids(uid)
    centered = _centered(scores, group, size)
    return centered / (_group_std(scores, group, size)[group] + 1e-6) if by_std else centered
