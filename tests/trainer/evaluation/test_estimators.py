"""Every estimator compared with the mean over all enumerated subsets of k responses."""

from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from math import comb

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trainer.evaluation.estimators import (
    MAX_VOTERS,
    best_of_k,
    binomial_cdf,
    clopper_pearson,
    maj_at_k,
    mean_with_interval,
    pass_at_k,
    winning,
)


def mean_score(vote: str, votes: Sequence[str | None], scores: Sequence[float]) -> float:
    return float(np.mean([score for other, score in zip(votes, scores, strict=True) if other == vote]))


def majority(subset: Sequence[int], votes: Sequence[str | None], scores: Sequence[float]) -> float:
    counts = Counter(votes[i] for i in subset if votes[i] is not None)
    winners = [vote for vote, count in counts.items() if count == max(counts.values()) and vote is not None]
    return sum(mean_score(vote, votes, scores) for vote in winners) / len(winners) if winners else 0.0


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_fraction_of_subsets_with_a_passing_response(passed: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(passed)))
    subsets = list(combinations(passed, k))
    assert pass_at_k(len(passed), sum(passed), k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-5, 5)), min_size=1, max_size=8), st.data())
def test_best_of_k_is_the_mean_over_subsets_of_the_response_with_the_best_score(
    answers: list[tuple[int, float]], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(answers)))
    picked = [max(subset, key=lambda answer: answer[0])[1] for subset in combinations(answers, k)]
    assert best_of_k(*zip(*answers, strict=True), k) == pytest.approx(sum(picked) / len(picked), abs=1e-9)


def test_pass_at_k_of_many_responses() -> None:
    assert pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5, rel=1e-9)
    assert pass_at_k(10_000, 0, 10_000) == 0.0 and pass_at_k(3, 3, 1) == 1.0
    assert pass_at_k(200, 3, 100) == pytest.approx(1 - comb(197, 100) / comb(200, 100), rel=1e-9)


Answers = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c", "d", None]), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=8
)


@given(Answers, st.data())
@example([("a", 1.0), ("b", 0.0), ("b", 0.0), ("a", 1.0), (None, 1.0)], None)
@example([(None, 1.0)], None)
def test_maj_at_k_is_the_mean_over_subsets(answers: list[tuple[str | None, float]], data: st.DataObject | None) -> None:
    votes, scores = [vote for vote, _ in answers], [score for _, score in answers]
    sizes = [data.draw(st.integers(1, len(votes)))] if data is not None else range(1, len(votes) + 1)
    for k in sizes:
        plain = np.mean([majority(subset, votes, scores) for subset in combinations(range(len(votes)), k)])
        assert maj_at_k(votes, scores, k) == pytest.approx(plain, abs=1e-12)


def test_maj_at_1_is_the_mean_and_maj_at_n_the_winner() -> None:
    votes, scores = ["x"] * 5 + ["y"] * 3, [1.0] * 5 + [0.0] * 3
    assert maj_at_k(votes, scores, 1) == pytest.approx(5 / 8)
    assert maj_at_k(votes, scores, 8) == 1.0
    assert maj_at_k(["x", "y", "z"], [1.0, 0.0, 0.5], 3) == pytest.approx(0.5), "a tie of three"


def test_probabilities_of_winning_sum_to_one() -> None:
    sizes = [1, 2, 3, 5, 8, 13, 32]
    wins = winning(sizes, 0, 6)
    assert sum(wins[size] for size in sizes) == pytest.approx(1.0, abs=1e-12)
    assert wins[32] > wins[13] > wins[8] > wins[1] > 0


def test_too_many_voters_are_refused() -> None:
    assert maj_at_k(["a"] * MAX_VOTERS, [1.0] * MAX_VOTERS, MAX_VOTERS // 2) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="maj@k of 1001 answers to a prompt: at most 1000 can be counted"):
        maj_at_k(["a"] * 1001, [1.0] * 1001, 2)


@pytest.mark.parametrize(
    ("c", "n", "low", "high"),
    [(0, 10, 0.0, 0.30850), (10, 10, 0.69150, 1.0), (5, 10, 0.18709, 0.81291), (1, 20, 0.00127, 0.24873)],
)
def test_clopper_pearson_equals_published_tables(c: int, n: int, low: float, high: float) -> None:
    assert clopper_pearson(c, n) == pytest.approx((low, high), abs=1e-5)


def test_binomial_tails_are_sums_of_terms() -> None:
    assert binomial_cdf(3, 9, 0.3) == pytest.approx(sum(comb(9, x) * 0.3**x * 0.7 ** (9 - x) for x in range(4)), rel=1e-12)
    assert clopper_pearson(700, 1319)[0] == pytest.approx(0.5033, abs=5e-4)


def test_zeros_and_ones_have_an_exact_interval() -> None:
    assert mean_with_interval([1.0] * 10, 100, 0) == (1.0, *clopper_pearson(10, 10), "exact")
    assert mean_with_interval([0.0, 1.0, 1.0], 100, 0) == (pytest.approx(2 / 3), *clopper_pearson(2, 3), "exact")


def test_bootstrap_is_repeatable_and_near_the_normal_interval() -> None:
    values = np.random.default_rng(0).random(400)
    found = mean_with_interval(values.tolist(), 2000, 7)
    assert found == mean_with_interval(values.tolist(), 2000, 7) != mean_with_interval(values.tolist(), 2000, 8)
    assert found.kind == "bootstrap" and found.value == pytest.approx(values.mean())
    error = 1.96 * values.std(ddof=1) / 20
    assert (found.low, found.high) == pytest.approx((values.mean() - error, values.mean() + error), abs=0.15 * error)
