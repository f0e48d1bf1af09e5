import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.algorithms.moments import RunningMoments


@given(st.lists(st.lists(st.floats(-1e3, 1e3), max_size=6), min_size=1, max_size=5))
def test_moments_of_parts_equal_moments_of_the_whole(parts: list[list[float]]) -> None:
    moments = RunningMoments()
    for part in parts:
        moments.update(torch.tensor(part, dtype=torch.float64))
    whole = torch.tensor([value for part in parts for value in part], dtype=torch.float64)
    assert moments.mean == pytest.approx(float(whole.mean()) if len(whole) else 0.0, abs=1e-9)
    if len(whole) > 1 and whole.std() > 1e-3:
        assert moments.std == pytest.approx(float(whole.std(correction=0)), rel=1e-9)
    other = RunningMoments()
    other.load(moments.state())
    assert other == moments


def test_non_finite_values_are_ignored() -> None:
    moments, clean = RunningMoments(), RunningMoments()
    moments.update(torch.tensor([1.0, float("nan"), 3.0, float("inf")]))
    moments.update(torch.tensor([float("nan")]))
    clean.update(torch.tensor([1.0, 3.0]))
    assert moments == clean


def test_moments_without_values_leave_rewards_unchanged() -> None:
    assert (RunningMoments().mean, RunningMoments().std) == (0.0, 1.0)
