"""Invariants of the estimators, on padded random batches in float64."""

from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.trainer.algorithms import padded

STD, PLAIN = {"norm_adv_by_std_in_grpo": True}, {"norm_adv_by_std_in_grpo": False}
GROUPWISE: list[tuple[str, dict[str, Any]]] = [
    ("grpo", STD), ("grpo", PLAIN), ("grpo_passk", STD), ("grpo_passk", PLAIN), ("rloo", {}), ("opo", {}),
]  # fmt: skip
BATCHWISE: list[tuple[str, dict[str, Any]]] = [("reinforce_plus_plus_baseline", {}), ("gpg", {}), ("gdpo", STD)]
TOKENWISE: list[tuple[str, dict[str, Any]]] = [
    ("gae", {"gamma": 0.95, "lam": 0.9}), ("reinforce_plus_plus", {"gamma": 0.95}), ("remax", {}), ("optimal_token_baseline", {}),
]  # fmt: skip
EVERY = GROUPWISE + BATCHWISE + TOKENWISE
seeds = st.integers(0, 10**6)
few = settings(max_examples=25)


def ids(entry: Any) -> str | None:
    return entry if isinstance(entry, str) else "-".join(str(value) for value in entry.values())


@dataclass(frozen=True)
class Answers:
    """B responses of up to R tokens with the score on the last trained token. Every group has at least two responses."""

    mask: Tensor
    scores: Tensor
    groups: list[Any]
    values: Tensor
    baselines: Tensor
    log_probs: Tensor
    energy: Tensor

    def rewards(self) -> Tensor:
        last = (self.mask * torch.arange(1.0, self.mask.shape[1] + 1)).argmax(1)
        return torch.zeros_like(self.mask).index_put_((torch.arange(len(last)), last), self.scores)

    def rows(self, order: Tensor) -> "Answers":
        tensors = {field.name: getattr(self, field.name)[order] for field in fields(self) if field.name != "groups"}
        return Answers(groups=[self.groups[i] for i in order.tolist()], **tensors)


def draw(seed: int, *, full: bool = False) -> Answers:
    g = torch.Generator().manual_seed(seed)
    sizes = torch.randint(2, 5, (int(torch.randint(1, 4, (1,), generator=g)),), generator=g)
    groups = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    groups = groups[torch.randperm(len(groups), generator=g)]
    n, width = len(groups), int(torch.randint(2, 9, (1,), generator=g))
    lengths = torch.randint(1, width + 1, (n, 1), generator=g)
    mask = (torch.arange(width) < lengths) & (torch.rand(n, width, generator=g) < 0.8)
    mask[:, 0] |= ~mask.any(1)
    real = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    probability = torch.rand(n, width, generator=g, dtype=torch.float64) * 0.9 + 0.05
    return Answers(
        mask=torch.ones(n, width, dtype=torch.float64) if full else mask.double(), scores=real(n), groups=groups.tolist(),
        values=real(n, width), baselines=real(n), log_probs=probability.log(), energy=probability**2 + 0.02,
    )  # fmt: skip


def both(name: str, answers: Answers, **options: Any) -> tuple[Tensor, Tensor]:
    extra: dict[str, Any] = {}
    if name == "optimal_token_baseline":
        extra = {"old_log_probs": answers.log_probs, "sum_pi_squared": answers.energy}
    if name == "gdpo":
        extra = {"rewards": {"right": answers.scores, "brief": answers.baselines}}
    return padded.advantages(
        name, answers.rewards(), answers.mask, answers.groups,
        values_BR=answers.values, baselines_B=answers.baselines, **extra, **options,
    )  # fmt: skip


def compute(name: str, answers: Answers, **options: Any) -> Tensor:
    return both(name, answers, **options)[0]


def per_row(answers: Answers, advantages: Tensor) -> Tensor:
    """The advantage (B,) shared by all tokens of a response."""
    shared = advantages.sum(1) / answers.mask.sum(1)
    torch.testing.assert_close(advantages, shared[:, None] * answers.mask)
    return shared


def group_sums(answers: Answers, values: Tensor) -> Tensor:
    names = sorted(set(answers.groups))
    return torch.stack([values[[i for i, group in enumerate(answers.groups) if group == name]].sum() for name in names])


def equal(left: Tensor, right: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(left, right, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("name", "options"), [*GROUPWISE, ("reinforce_plus_plus_baseline", {})], ids=ids)
@few
@given(seeds, st.floats(-50, 50))
def test_constant_added_to_the_scores_of_a_group_changes_nothing(name: str, options: dict, seed: int, constant: float) -> None:
    answers = draw(seed)
    in_first = torch.tensor([group == answers.groups[0] for group in answers.groups])
    shifted = replace(answers, scores=answers.scores + constant * in_first)
    equal(compute(name, shifted, **options), compute(name, answers, **options), 1e-6)


@few
@given(seeds, st.floats(-50, 50))
def test_estimator_specific_shifts_change_nothing(seed: int, constant: float) -> None:
    answers, full = draw(seed), draw(seed, full=True)
    shifted = replace(answers, scores=answers.scores + constant, baselines=answers.baselines + constant)
    equal(compute("remax", shifted), compute("remax", answers), 1e-7)  # the score of the greedy response is shifted too
    equal(compute("gdpo", shifted, **STD), compute("gdpo", answers, **STD), 3e-5)
    equal(compute("reinforce_plus_plus", shifted, gamma=1.0), compute("reinforce_plus_plus", answers, gamma=1.0), 1e-6)
    moved = replace(full, scores=full.scores + constant)
    equal(compute("optimal_token_baseline", moved), compute("optimal_token_baseline", full), 1e-5)


LINEAR = [
    ("grpo", PLAIN),
    ("grpo_passk", PLAIN),
    ("rloo", {}),
    ("opo", {}),
    ("gpg", {}),
    ("remax", {}),
    ("optimal_token_baseline", {}),
]
INVARIANT = [
    ("grpo", STD), ("grpo_passk", STD), ("reinforce_plus_plus", {"gamma": 0.9}), ("reinforce_plus_plus_baseline", {}),
    ("gdpo", STD), ("gae", {"gamma": 0.9, "lam": 0.8}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options"), LINEAR, ids=ids)
@few
@given(seeds, st.floats(0.1, 30))
def test_scaled_scores_give_scaled_advantages(name: str, options: dict, seed: int, factor: float) -> None:
    answers = draw(seed)
    scaled = replace(answers, scores=answers.scores * factor, baselines=answers.baselines * factor)
    equal(compute(name, scaled, **options), compute(name, answers, **options) * factor)


@pytest.mark.parametrize(("name", "options"), INVARIANT, ids=ids)
@few
@given(seeds, st.floats(0.1, 30))
def test_estimators_that_divide_by_std_are_scale_invariant(name: str, options: dict, seed: int, factor: float) -> None:
    answers = draw(seed)
    # Scores far enough apart that no standard deviation is close to the epsilons and gdpo's two rewards do not cancel.
    spread = 20 * torch.arange(len(answers.scores), dtype=torch.float64)
    answers = replace(answers, scores=answers.scores + spread, baselines=answers.baselines + spread)
    scaled = replace(
        answers, scores=answers.scores * factor, baselines=answers.baselines * factor, values=answers.values * factor
    )  # fmt: skip
    equal(compute(name, scaled, **options), compute(name, answers, **options), 1e-4)


@few
@given(seeds)
def test_advantages_of_a_group_sum_to_zero(seed: int) -> None:
    answers = draw(seed)
    for name, options in [("grpo", STD), ("grpo", PLAIN), ("rloo", {}), ("gpg", {})]:
        sums = group_sums(answers, per_row(answers, compute(name, answers, **options)))
        equal(sums, torch.zeros_like(sums))
    tokens = group_sums(answers, compute("opo", answers).sum(1))  # OPO's baseline is weighted by length
    equal(tokens, torch.zeros_like(tokens))
    for name in ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo", "gae"):
        assert abs(float(compute(name, answers).sum())) < 1e-7, name


@pytest.mark.parametrize(("name", "options"), EVERY, ids=ids)
@few
@given(seeds)
def test_row_permutation_permutes_the_advantages(name: str, options: dict, seed: int) -> None:
    answers = draw(seed)
    order = torch.randperm(len(answers.scores), generator=torch.Generator().manual_seed(seed))
    for permuted, original in zip(both(name, answers.rows(order), **options), both(name, answers, **options), strict=True):
        equal(permuted, original[order])


@pytest.mark.parametrize(("name", "options"), [*GROUPWISE, ("remax", {}), ("optimal_token_baseline", {})], ids=ids)
@few
@given(seeds)
def test_splitting_a_batch_between_groups_changes_nothing(name: str, options: dict, seed: int) -> None:
    answers = draw(seed)
    whole = compute(name, answers, **options)
    for group in set(answers.groups):
        rows = torch.tensor([i for i, other in enumerate(answers.groups) if other == group])
        equal(compute(name, answers.rows(rows), **options), whole[rows])


@pytest.mark.parametrize(("name", "options"), EVERY, ids=ids)
@few
@given(seeds)
def test_group_labels_and_extra_padding_change_nothing(name: str, options: dict, seed: int) -> None:
    answers = draw(seed)
    wider = {key: torch.nn.functional.pad(getattr(answers, key), (0, 3), value=value)
             for key, value in [("mask", 0.0), ("values", 7.0), ("log_probs", -1.0), ("energy", 0.5)]}  # fmt: skip
    other = replace(answers, groups=[f"prompt {3 - 2 * group}" for group in answers.groups], **wider)
    equal(compute(name, other, **options)[:, :-3], compute(name, answers, **options))


def moved_left(mask: Tensor, *columns: Tensor) -> list[Tensor]:
    """``mask`` and ``columns`` with the trained tokens of each row moved to the front."""
    order = torch.argsort(1 - mask, dim=1, stable=True)
    return [column.gather(1, order) for column in (mask, *columns)]


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus"])
@few
@given(seeds)
def test_untrained_tokens_are_skipped_not_discounted(name: str, seed: int) -> None:
    answers = draw(seed)
    options = {"gamma": 0.8, "lam": 0.7} if name == "gae" else {"gamma": 0.8}
    mask, values = moved_left(answers.mask, answers.values)
    dense = both(name, replace(answers, mask=mask, values=values), **options)
    for sparse, expected in zip(both(name, answers, **options), dense, strict=True):
        equal(moved_left(answers.mask, sparse)[1], expected)


def white(values: Tensor) -> Tensor:
    return (values - values.mean()) / torch.sqrt(values.var() + 1e-8)


@few
@given(seeds)
def test_gae_at_lam_one_is_return_minus_value(seed: int) -> None:
    """Returns are the rewards to go, and advantages are white(return - value)."""
    answers = draw(seed)
    advantages, returns = both("gae", answers, gamma=1.0, lam=1.0)
    earned = answers.scores[:, None] * answers.mask
    equal(returns, earned)
    marked = answers.mask > 0
    equal(advantages[marked], white((earned - answers.values)[marked]), 1e-7)


@few
@given(seeds, st.sampled_from([0.0, 0.6, 1.0]))
def test_gae_at_lam_zero_is_the_td_error(seed: int, gamma: float) -> None:
    answers = draw(seed)
    mask, values = moved_left(answers.mask, answers.values)
    answers = replace(answers, mask=mask, values=values)
    advantages, returns = both("gae", answers, gamma=gamma, lam=0.0)
    following = torch.nn.functional.pad((values * mask)[:, 1:], (0, 1))
    target = (answers.rewards() + gamma * following) * mask
    equal(returns, target)
    equal(advantages[mask > 0], white((target - values)[mask > 0]), 1e-7)


@few
@given(seeds)
def test_whitened_advantages_have_mean_zero_and_deviation_one(seed: int) -> None:
    answers = draw(seed)
    for name in ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        marked = compute(name, answers)[answers.mask > 0]
        assert abs(float(marked.mean())) < 1e-7 and abs(float(marked.std()) - 1) < 1e-4, name


@few
@given(seeds, st.sampled_from([0.0, 1.0, -3.25, 0.7]))
def test_groups_of_equal_scores_have_zero_advantage(seed: int, score: float) -> None:
    answers = draw(seed)
    answers = replace(answers, scores=torch.full_like(answers.scores, score))
    answers = replace(answers, baselines=torch.full_like(answers.baselines, score / 3))
    for name, options in [*GROUPWISE, ("gpg", {}), ("reinforce_plus_plus_baseline", {}), ("gdpo", STD)]:
        size = compute(name, answers, **options).abs().max()
        assert size < 1e-14 if name == "opo" else size == 0, name  # a length-weighted mean may differ in the last digit


@few
@given(seeds)
def test_group_of_one_keeps_its_score(seed: int) -> None:
    answers = draw(seed)
    alone = replace(answers, groups=list(range(len(answers.groups))))
    score = alone.scores[:, None] * alone.mask
    for name, options in [("grpo", PLAIN), ("rloo", {}), ("opo", {}), ("optimal_token_baseline", {})]:
        equal(compute(name, alone, **options), score)
    equal(compute("grpo", alone, **STD), score, 2e-6)
    equal(compute("gpg", alone), score * len(alone.scores) / int((alone.scores != 0).sum()))
    equal(compute("reinforce_plus_plus_baseline", alone), compute("reinforce_plus_plus", alone, gamma=1.0), 1e-7)


@few
@given(seeds)
def test_rloo_leaves_one_out(seed: int) -> None:
    answers = draw(seed)
    found = per_row(answers, compute("rloo", answers))
    for i, group in enumerate(answers.groups):
        others = [float(answers.scores[j]) for j, other in enumerate(answers.groups) if other == group and j != i]
        assert abs(float(found[i]) - (float(answers.scores[i]) - sum(others) / len(others))) < 1e-9


@few
@given(seeds)
def test_passk_rewards_the_best_response_by_its_lead(seed: int) -> None:
    """Pass@k with k = group size: the best response gets its contribution to the group's maximum, the others 0."""
    answers = draw(seed)
    plain, normed = (per_row(answers, compute("grpo_passk", answers, **options)) for options in (PLAIN, STD))
    for i, group in enumerate(answers.groups):
        rows = [j for j, other in enumerate(answers.groups) if other == group]
        lead = max(0.0, float(answers.scores[i]) - max(float(answers.scores[j]) for j in rows if j != i))
        assert abs(float(plain[i]) - lead) < 1e-9
        assert abs(float(normed[i]) - lead / (float(answers.scores[rows].std()) + 1e-6)) < 1e-9


@few
@given(seeds)
def test_opo_weights_its_baseline_by_length(seed: int) -> None:
    answers = draw(seed)
    found, lengths = per_row(answers, compute("opo", answers)), answers.mask.sum(1)
    for i, group in enumerate(answers.groups):
        rows = [j for j, other in enumerate(answers.groups) if other == group]
        baseline = sum(float(lengths[j] * answers.scores[j]) for j in rows) / sum(float(lengths[j]) for j in rows)
        assert abs(float(found[i]) - (float(answers.scores[i]) - baseline)) < 1e-9


@few
@given(seeds)
def test_optimal_token_baseline_by_its_definition(seed: int) -> None:
    """Whole rows: B_t = sum_i G_it W_it / sum_i W_it, W_it = sum of 1 - 2 pi + sum of pi squared up to t."""
    answers = draw(seed, full=True)
    found, width = compute("optimal_token_baseline", answers), answers.mask.shape[1]
    energy = 1 - 2 * answers.log_probs.exp() + answers.energy
    for i, group in enumerate(answers.groups):
        rows = [j for j, other in enumerate(answers.groups) if other == group]
        for t in range(width):
            weight = [float(energy[j, : t + 1].sum()) for j in rows]
            baseline = sum(float(answers.scores[j]) * w for j, w in zip(rows, weight, strict=True)) / sum(weight)
            assert abs(float(found[i, t]) - (float(answers.scores[i]) - baseline)) < 1e-6


def rewards_to_go(answers: Answers, row: int, gamma: float) -> list[float]:
    """Discounted score at each trained token of a row; the score is on the last one."""
    marked = int(answers.mask[row].sum())
    return [float(answers.scores[row]) * gamma ** (marked - 1 - k) for k in range(marked)]


@few
@given(seeds, st.sampled_from([1.0, 0.9, 0.0]))
def test_rewards_to_go_by_their_definition(seed: int, gamma: float) -> None:
    answers = draw(seed)
    advantages, returns = both("reinforce", answers, gamma=gamma)
    _, whitened_from = both("reinforce_plus_plus", answers, gamma=gamma)
    remax, undiscounted = both("remax", answers)
    for row in range(len(answers.scores)):
        marked = answers.mask[row] > 0
        expected = torch.tensor(rewards_to_go(answers, row, gamma), dtype=torch.float64)
        for found in (advantages, returns, whitened_from):
            equal(found[row][marked], expected)
        equal(undiscounted[row][marked], answers.scores[row].expand(int(marked.sum())))
        equal(remax[row][marked], (answers.scores[row] - answers.baselines[row]).expand(int(marked.sum())))
    every = returns[answers.mask > 0]
    equal(compute("reinforce_plus_plus", answers, gamma=gamma)[answers.mask > 0], white(every), 1e-7)


def centred(answers: Answers, scores: Tensor, *, by_std: bool) -> Tensor:
    """scores (B,) minus the group mean, divided by the group's standard deviation."""
    out = torch.empty_like(scores)
    for i, group in enumerate(answers.groups):
        others = [float(scores[j]) for j, other in enumerate(answers.groups) if other == group]
        mean = sum(others) / len(others)
        deviation = (sum((x - mean) ** 2 for x in others) / (len(others) - 1)) ** 0.5 + 1e-6
        out[i] = (float(scores[i]) - mean) / (deviation if by_std else 1.0)
    return out


@few
@given(seeds)
def test_group_estimators_by_their_definition(seed: int) -> None:
    answers = draw(seed)
    answers = replace(answers, scores=torch.where(answers.scores > 1.0, 0.0, answers.scores))
    for options in (STD, PLAIN):
        expected = centred(answers, answers.scores, by_std=options["norm_adv_by_std_in_grpo"])
        equal(per_row(answers, compute("grpo", answers, **options)), expected)
    plain = centred(answers, answers.scores, by_std=False)
    equal(per_row(answers, compute("gpg", answers)), plain * len(plain) / max(1, int((answers.scores != 0).sum())), 1e-7)
    marked = answers.mask > 0
    equal(compute("reinforce_plus_plus_baseline", answers)[marked], white((plain[:, None] * answers.mask)[marked]), 1e-7)
    total = 0.7 * centred(answers, answers.scores, by_std=True) + 2.0 * centred(answers, answers.baselines, by_std=True)
    found = compute("gdpo", answers, gdpo_reward_weights=[0.7, 2.0], **STD)
    equal(found[marked], white((total[:, None] * answers.mask)[marked]), 1e-6)


def plain_turns(row: list[tuple[float, float, float]], gamma: float, lam: float) -> list[float]:
    """Returns of one response by GAE over its turns. row: (mask, reward, V) of each token; rewards at a turn's last token."""
    turns: list[list[tuple[float, float]]] = []
    before = 0.0
    for mask, reward, value in row:
        if mask and not before:
            turns.append([])
        if mask:
            turns[-1].append((reward, value))
        before = mask
    returns: list[float] = []
    ahead, following = 0.0, 0.0
    for turn in reversed(turns):
        start = turn[0][1]
        ahead = sum(reward for reward, _ in turn) + gamma * following - start + gamma * lam * ahead
        returns = [ahead + start] * len(turn) + returns
        following = start
    return returns


@few
@given(seeds)
def test_gamma_over_turns_is_gae_of_turns_whose_tokens_have_one_return(seed: int) -> None:
    """Turn-level rewards; each token's own V is its baseline. Reward to go is the same without values."""
    a = draw(seed)
    ends = a.mask * (1 - torch.nn.functional.pad(a.mask, (0, 1))[:, 1:])
    rewards = torch.randn(a.mask.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * ends
    options = {"gamma": 0.9, "lam": 0.7, "gamma_over": "turn"}
    _, returns = padded.advantages("gae", rewards, a.mask, a.groups, values_BR=a.values, **options)
    _, to_go = padded.advantages("reinforce", rewards, a.mask, a.groups, **options)
    for lam, values, found in ((0.7, a.values, returns), (1.0, torch.zeros_like(a.values), to_go)):
        for mask, reward, value, row in zip(a.mask, rewards, values, found, strict=True):
            expected = plain_turns(list(zip(mask.tolist(), reward.tolist(), value.tolist(), strict=True)), 0.9, lam)
            torch.testing.assert_close(row[mask > 0], torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-12)


@few
@given(seeds)
def test_turns_of_one_token_are_discounted_as_tokens(seed: int) -> None:
    a = draw(seed)
    spaced = torch.stack([torch.zeros_like(a.mask), a.mask], -1).flatten(1)
    rewards, values = (torch.stack([torch.zeros_like(x), x], -1).flatten(1) for x in (a.rewards(), a.values))
    found = [
        padded.advantages(name, rewards, spaced, a.groups, values_BR=values, gamma=0.9, lam=0.7, gamma_over=over)
        for name in ("gae", "reinforce", "reinforce_plus_plus")
        for over in ("token", "turn")
    ]
    for by_token, by_turn in zip(found[::2], found[1::2], strict=True):
        assert all(map(torch.equal, by_token, by_turn))
