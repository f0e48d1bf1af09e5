import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.algorithms.moments import RunningMoments


@given(st.lists(st.lists(st.floats(-1e3, 1e3), max_size=6), min_size=1, max_size=5))
def test_parts_give_what_the_whole_gives(parts: list[list[float]]) -> None:
    moments = RunningMoments()
    for part in parts:
        moments.see(torch.tensor(part, dtype=torch.float64))
    whole = torch.tensor([value for part in parts for value in part], dtype=torch.float64)
    assert moments.mean == pytest.approx(float(whole.mean()) if len(whole) else 0.0, abs=1e-9)
    if len(whole) > 1 and whole.std() > 1e-3:
        assert moments.std == pytest.approx(float(whole.std(correction=0)), rel=1e-9)
    other = RunningMoments()
    other.load(moments.state())
    assert other == moments


def test_what_is_not_finite_is_not_seen() -> None:
    moments, clean = RunningMoments(), RunningMoments()
    moments.see(torch.tensor([1.0, float("nan"), 3.0, float("inf")]))
    moments.see(torch.tensor([float("nan")]))
    clean.see(torch.tensor([1.0, 3.0]))
    assert moments == clean


def test_before_anything_was_seen_nothing_changes() -> None:
    assert (RunningMoments().mean, RunningMoments().std) == (0.0, 1.0)
