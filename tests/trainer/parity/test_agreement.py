"""Metrics of synthetic responses, by hand and by property."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.parity.made import BOS, EOS, drawn, made
from trainer.parity.agreement import (
    EngineResponses,
    agreement,
    choices,
    common_prefix,
    differences,
    draw_z,
    ends,
    heads,
    length_figures,
)

ROWS = [[5, 6, EOS], [7, EOS], [5, 5, 5, 5, EOS]]
answer = st.lists(st.integers(3, 6), min_size=1, max_size=6)


def changed(answers: EngineResponses, name: str, place: int, value: float) -> EngineResponses:
    column = getattr(answers, name).copy()
    column[place] = value
    return replace(answers, **{name: column})


def test_differences_are_engine_minus_trainer() -> None:
    found = differences(changed(made(ROWS, offset=-1e-3), "log_probs", 4, -0.25 + 0.5))
    assert (found.uid, found.position) == (11, 1) and found.max_abs == pytest.approx(0.5)
    assert found.mean == pytest.approx((0.5 - 9e-3) / 10) and found.mean_abs == pytest.approx((0.5 + 9e-3) / 10)
    assert found.quantiles["0.5"] == pytest.approx(1e-3) and 1e-3 < found.quantiles["0.99"] < 0.5
    assert list(found.quantiles) == ["0.5", "0.9", "0.99", "0.999"]


def test_nan_difference_is_the_largest() -> None:
    found = differences(changed(made(ROWS, offset=0.1), "trainer_log_probs", 7, float("nan")))
    assert (found.uid, found.position) == (12, 2) and np.isnan(found.max_abs)


@given(st.lists(st.floats(-5, 5), min_size=10, max_size=10))
def test_quantiles_are_monotonic_and_at_most_the_largest(offsets: list[float]) -> None:
    answers = made(ROWS)
    found = differences(replace(answers, log_probs=answers.trainer_log_probs + np.array(offsets)))
    values = [*found.quantiles.values(), found.max_abs]
    assert values == sorted(values) and abs(found.mean) <= found.mean_abs <= found.max_abs


def test_token_within_the_margin_counts_as_the_trainers_choice() -> None:
    near = changed(changed(made(ROWS), "trainer_log_probs", 3, -0.25 - 1e-5), "trainer_log_probs", 9, -0.25 - 0.3)
    found = choices(near, margin=1e-4)
    assert (found.first, found.within) == (0.8, 0.9)
    assert (found.uid, found.position) == (12, 4) and found.largest_gap == pytest.approx(0.3)
    assert choices(near, margin=0.4).within == 1.0 and choices(made(ROWS), margin=0.0).first == 1.0


def test_first_divergence_of_two_engines() -> None:
    own = made([[5, 6, EOS], [8, EOS], [5, 5, 5, EOS]], margin=0.125, gap=0.125)
    found = agreement(made(ROWS), own)
    assert found.answers == pytest.approx(1 / 3) and found.tokens == (3 + 0 + 3) / (3 + 2 + 5)
    first, second = found.divergences
    assert (first.uid, first.position, first.tokens, first.margin) == (11, 0, (7, 8), 1.0)
    assert first.log_probs == (-0.25, -0.375)
    assert (second.uid, second.position, second.tokens) == (12, 3, (5, EOS))


def test_shorter_response_has_no_token_at_the_divergence() -> None:
    longer, shorter = made([[5, 6, 7]]), made([[5, 6]], margin=0.5)
    assert agreement(longer, shorter).divergences[0].tokens == (7, None)
    found = agreement(shorter, longer).divergences[0]
    assert (found.tokens, found.log_probs, found.margin) == ((None, 7), (None, -0.25), 1.0)


@given(st.lists(st.tuples(answer, answer), min_size=1, max_size=5))
def test_agreement_is_one_only_for_equal_responses(pairs: list[tuple[list[int], list[int]]]) -> None:
    first, second = (made([pair[i] for pair in pairs]) for i in range(2))
    found, back = agreement(first, second), agreement(second, first)
    assert (found.tokens == 1.0) == (found.answers == 1.0) == (not found.divergences) == all(a == b for a, b in pairs)
    assert found.tokens == back.tokens and found.answers == back.answers
    assert agreement(first, first).tokens == 1.0
    for divergence in found.divergences:
        a, b = pairs[divergence.uid - 10]
        assert a[: divergence.position] == b[: divergence.position] and divergence.tokens[0] != divergence.tokens[1]


@given(answer, answer)
def test_common_prefix_is_the_longest(first: list[int], second: list[int]) -> None:
    n = common_prefix(np.array(first), np.array(second))
    assert (first[:n] == second[:n] and first[n : n + 1] != second[n : n + 1]) or n == len(first) == len(second)


@pytest.mark.parametrize("spread", [0.3, 1.5, 5.0])
def test_samples_of_the_trainers_distribution_have_a_small_z(spread: float) -> None:
    made_of = {"from_temperature": 0.8, "at_temperature": 0.8, "spread": spread}
    values = [draw_z(drawn(20, **made_of, seed=seed)) for seed in range(200)]
    assert max(map(abs, values)) < 4.5
    assert 0.8 < float(np.std(values)) < 1.2 and abs(float(np.mean(values))) < 0.3


@pytest.mark.parametrize(("drawn_at", "sign"), [(1.0, -1), (0.6, 1)])
def test_samples_at_another_temperature_have_a_large_z(drawn_at: float, sign: int) -> None:
    assert draw_z(drawn(100, from_temperature=drawn_at, at_temperature=0.8)) * sign > 6


def test_distribution_without_entropy_has_z_zero() -> None:
    certain = made([[5, EOS]])
    assert draw_z(replace(certain, trainer_log_probs=np.zeros(2), entropy=np.zeros(2))) == 0.0


def test_correct_ends_have_no_problem() -> None:
    found = ends(made([[5, EOS], [6, 7], [3, EOS]], finished=[True, False, True], limit=2), [EOS, 9], [EOS, 0])
    assert found.wrong == {} and found.ended_by == {EOS: 2} and found.stopped == pytest.approx(2 / 3) and found.special == 0


@pytest.mark.parametrize(
    ("row", "finished", "what"),
    [
        ([5, 6], True, "it stopped, and not with a stop token"),
        ([5, EOS], False, "it ends with a stop token, and did not stop"),
        ([EOS, 5, 5, EOS], True, "it continues after a stop token"),
        ([5, 6], False, "it is shorter than it may be, and did not stop"),
        ([5, 5, 5, 5, EOS], True, "it is longer than it may be"),
    ],
)
def test_wrong_ends_are_classified(row: list[int], finished: bool, what: str) -> None:
    found = ends(made([row, [5, EOS]], finished=[finished, True], limit=4), [EOS], [])
    assert found.wrong[what] == 1
    assert set(found.wrong) <= {what, "it is shorter than it may be, and did not stop"}


def test_ignored_stop_tokens_are_no_problem() -> None:
    assert ends(made([[5, EOS, 6, EOS]], finished=[False], limit=4), (), [EOS]).wrong == {}


def test_special_tokens_inside_responses_are_counted() -> None:
    assert ends(made([[BOS, 5, 0, EOS], [0, EOS]]), [EOS], [0, EOS, BOS]).special == 3


def test_statistics_of_lengths() -> None:
    found = length_figures(np.array([1, 2, 3, 4, 100]))
    assert found.mean == 22 and found.quantiles["0"] == 1 and found.quantiles["0.5"] == 3 and found.quantiles["1"] == 100


def test_first_tokens_of_prompts() -> None:
    prompts = [(BOS, 5), (BOS, BOS, 5), (5, 6), (5, 7), (BOS,)]
    found = heads("<s>", BOS, prompts, [True, True, True, False, True])
    assert (found.wanted, found.begun, found.doubled, found.lost) == (4, 3, 1, 1)
