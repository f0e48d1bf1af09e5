"""Goodput under failures: simulated events compared with Daly's closed forms."""

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.planner.failures import FAILURES, FailureCosts, intervals

HOUR = 3600.0


@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(
    hours=st.floats(0.5, 50), save=st.floats(0, 120), restart=st.floats(0, 600), step=st.floats(5, 300), every=st.integers(1, 40)
)
def test_simulated_goodput_is_that_of_the_closed_form(hours: float, save: float, restart: float, step: float, every: int) -> None:
    costs = FailureCosts(hours * HOUR, save, restart)
    # Steps of different lengths, with the same mean.
    simulated = costs.goodput([0.8 * step, 1.2 * step, step], every)
    assert simulated == pytest.approx(costs.expected_goodput(every * step), abs=0.02)


def test_a_rare_failure_takes_no_more_memory() -> None:
    """One a year: the interval is no multiple of 1,000 steps, and a round over both is longer than the run of a lifetime."""
    costs, steps = FailureCosts(8760 * HOUR, 20.0, 180.0), [0.5 + place / 1000 for place in range(1000)]
    tracemalloc.start()
    found = costs.goodput(steps, 18_041)
    assert tracemalloc.get_traced_memory()[1] < 1e8
    tracemalloc.stop()
    assert found == pytest.approx(costs.expected_goodput(18_041 * sum(steps) / 1000), abs=0.01)


def test_best_simulated_interval_is_about_the_one_of_daly() -> None:
    costs, steps = FailureCosts(6 * HOUR, save=20.0, restart=180.0), [60.0]
    found = {every: costs.goodput(steps, every) for every in intervals(steps, costs)}
    best = max(found, key=lambda every: found[every])
    assert 0.6 < best * 60 / costs.daly() < 1.7
    assert found[best] == pytest.approx(costs.expected_goodput(costs.daly()), abs=0.01)
    assert found[1] < found[best] > found[360]


def test_interval_of_daly_has_the_largest_expected_goodput() -> None:
    costs = FailureCosts(6 * HOUR, save=20.0, restart=180.0)
    best = max(range(10, 20000), key=costs.expected_goodput)
    assert costs.daly() == pytest.approx(best, rel=0.01) and costs.daly() == pytest.approx(math.sqrt(2 * 20 * 6 * HOUR), rel=0.05)


def test_without_costs_only_the_steps_after_a_checkpoint_are_lost() -> None:
    costs = FailureCosts(10 * HOUR, save=0.0, restart=0.0)
    assert costs.goodput([1.0], 1) == pytest.approx(1.0, abs=1e-4)


def test_a_run_continues_at_its_checkpoint_and_not_at_the_first_step() -> None:
    # Steps of 1 and 1,000 s, in turn: after a failure the long one is still to be done.
    costs, steps = FailureCosts(500.0, save=2.0, restart=10.0), [1.0, 1000.0]
    at, useful, wall = 0, 0.0, 0.0
    for life in np.random.default_rng(0).exponential(500.0, FAILURES).tolist():
        wall, left = wall + life, life - 10.0
        while left >= steps[at % 2] + 2.0:
            left -= steps[at % 2] + 2.0
            useful, at = useful + steps[at % 2], at + 1
    assert costs.goodput(steps, 1) == pytest.approx(useful / wall)
