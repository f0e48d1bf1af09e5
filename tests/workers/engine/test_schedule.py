"""The learning rate as a function of the step."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.engine.toy import ADAMW
from workers.engine.schedule import learning_rate


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


@given(st.integers(0, 30), st.integers(0, 30), st.floats(0, 1), st.sampled_from([0.5, 1.0, 2.5]), st.integers(0, 100))
def test_never_outside_its_bounds(warmup: int, total: int, floor: float, cycles: float, step: int) -> None:
    lr = learning_rate(
        spec(schedule="cosine", warmup_steps=warmup, total_steps=total, min_lr_ratio=floor, num_cycles=cycles), step
    )
    assert (1 / warmup if step < warmup else floor) - 1e-12 <= lr <= 1.0
