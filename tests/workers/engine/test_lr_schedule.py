"""The learning rate as a function of the step."""

import dataclasses
import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.engine.toy import ADAMW
from workers.engine.lr_schedule import learning_rate


def spec(**changes: object) -> object:
    return dataclasses.replace(ADAMW, lr=1.0, **changes)


def test_constant() -> None:
    assert [learning_rate(spec(), step) for step in (0, 1, 1000)] == [1.0] * 3


def test_warm_up_is_linear_and_wastes_no_step() -> None:
    assert [learning_rate(spec(warmup_steps=4), step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_cosine() -> None:
    cosine = spec(schedule="cosine", warmup_steps=2, total_steps=10, min_lr_ratio=0.1)
    found = [learning_rate(cosine, step) for step in (0, 1, 2, 6, 10, 11, 500)]
    assert found == pytest.approx([0.5, 1.0, 1.0, 0.55, 0.1, 0.1, 0.1])


def test_more_cycles() -> None:
    waves = spec(schedule="cosine", total_steps=8, num_cycles=1.5)
    assert [learning_rate(waves, step) for step in (0, 8)] == pytest.approx([1.0, 0.0])
    assert learning_rate(waves, 4) == pytest.approx(0.5 * (1 + math.cos(1.5 * math.pi)))


def test_linear() -> None:
    linear = spec(schedule="linear", warmup_steps=2, total_steps=10, min_lr_ratio=0.2)
    found = [learning_rate(linear, step) for step in (0, 1, 2, 4, 6, 10, 500)]
    assert found == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.2, 0.2])


def test_wsd_holds_and_falls_over_the_last_tenth() -> None:
    wsd = spec(schedule="wsd", warmup_steps=4, total_steps=104, min_lr_ratio=0.1)
    assert [learning_rate(wsd, step) for step in (0, 3, 4, 50, 94)] == [0.25, 1.0, 1.0, 1.0, 1.0]
    assert [learning_rate(wsd, step) for step in (99, 104, 500)] == pytest.approx([0.55, 0.1, 0.1])


@given(st.sampled_from(["cosine", "linear", "wsd"]), st.integers(0, 30), st.integers(0, 200), st.floats(0, 1))
def test_they_fall_from_the_largest_rate_to_the_floor_without_a_leap(kind: str, warmup: int, total: int, floor: float) -> None:
    shape = spec(schedule=kind, warmup_steps=warmup, total_steps=total, min_lr_ratio=floor)
    rates = [learning_rate(shape, step) for step in range(warmup, max(warmup, total) + 2)]
    drops = [before - after for before, after in pairwise(rates)]
    decay = max(1, total - warmup) * (1 if kind != "wsd" else 0.1)
    assert rates[0] == 1.0 and rates[-1] == pytest.approx(floor)
    assert all(-1e-12 <= drop <= (1 - floor) * min(1.0, math.pi / 2 / decay) + 1e-12 for drop in drops)


@given(
    st.sampled_from(["cosine", "wsd"]), st.integers(0, 30), st.integers(0, 30), st.floats(0, 1),
    st.sampled_from([0.5, 1.0, 2.5]), st.integers(0, 100),
)  # fmt: skip
def test_never_outside_its_bounds(kind: str, warmup: int, total: int, floor: float, cycles: float, step: int) -> None:
    lr = learning_rate(spec(schedule=kind, warmup_steps=warmup, total_steps=total, min_lr_ratio=floor, num_cycles=cycles), step)
    assert (1 / warmup if step < warmup else floor) - 1e-12 <= lr <= 1.0
