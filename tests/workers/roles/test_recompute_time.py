import pytest

from workers.roles.recompute_time import RecomputeTime


def test_seconds_above_other_steps_by_the_share_of_tokens() -> None:
    """Steps of 2 s, and 0.01 s for each token of prompts; 300 of 400 such tokens were submitted again."""
    times = RecomputeTime()
    times.again = 300
    for prefilled in (100, 300, 0, 0, 0, 0):
        times.add(2.0 + 0.01 * prefilled, prefilled)
    assert times.take() == pytest.approx(3.0)
    assert times.take() == 0.0, "since the last call"


def test_the_step_that_waits_for_the_results_counts_too() -> None:
    """vLLM with asynchronous scheduling: the step after the one that begins to compute takes longer."""
    times = RecomputeTime()
    times.again = 500
    for seconds, prefilled in ((1.0, 0), (1.0, 500), (6.0, 0), (1.0, 0)):
        times.add(seconds, prefilled)
    assert times.take() == pytest.approx(5.0)


def test_nothing_is_estimated_without_other_steps_or_from_faster_ones() -> None:
    times = RecomputeTime()
    times.again = 100
    times.add(2.0, 100)
    times.add(2.0, 0)
    assert times.take() == 0.0
    times.again = 100
    for seconds, prefilled in ((2.0, 0), (1.0, 100)):
        times.add(seconds, prefilled)
    assert times.take() == 0.0
