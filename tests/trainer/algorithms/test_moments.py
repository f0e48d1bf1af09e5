import statistics
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.algorithms.moments import RunningMoments, whitened


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


LENGTHS, UID = torch.tensor([3, 2, 4, 1, 2]), torch.tensor([7, 7, 2, 9, 7])  # responses 0, 1 and 4 are a group
MASK = torch.tensor([0.0, 1, 1, 1, 1, 0, 1, 0, 1, 1, 0, 0])  # the last response has no trained token
VALUES = torch.tensor([9.0, 1, 4, -2, 0.5, 9, 3, 9, -1, 6, 9, 9])
MIXED = torch.arange(12).flip(0)


def plain(parts: list[list[int]]) -> list[float]:
    """Reference: normalise each part's trained tokens; other parts unchanged, untrained tokens 0."""
    found = (VALUES * MASK).tolist()
    for part in parts:
        values = [VALUES[t].item() for t in part]
        mean, std = statistics.fmean(values), statistics.pstdev(values)
        for t in part:
            found[t] = (VALUES[t].item() - mean) / std
    return found


@pytest.mark.parametrize(
    ("over", "parts"), [("batch", [[1, 2, 3, 4, 6, 8, 9]]), ("group", [[1, 2, 3, 4]])], ids=["batch", "group"]
)
def test_whitening_equals_the_plain_formula(over: Literal["batch", "group"], parts: list[list[int]]) -> None:
    """Statistics are over tokens, not responses; groups of one (here 2 and 9) are unchanged."""
    found = whitened(VALUES, MASK, LENGTHS, UID, over)
    assert found.tolist() == pytest.approx(plain(parts), abs=1e-6) and found.dtype == VALUES.dtype


@pytest.mark.parametrize("over", ["batch", "group"])
@given(values=st.lists(st.floats(-1e4, 1e4, width=32), min_size=12, max_size=12), scale=st.floats(0.25, 8.0))
def test_shift_scale_and_order_do_not_change_whitened_values(
    over: Literal["batch", "group"], values: list[float], scale: float
) -> None:
    uid = torch.tensor([7, 7, 2, 2, 7])
    given_values = torch.tensor(values, dtype=torch.float64)
    found = whitened(given_values, MASK, LENGTHS, uid, over)
    assert (found[MASK == 0] == 0).all()
    parts = [MASK.bool()] if over == "batch" else [MASK.bool() & (torch.repeat_interleave(uid, LENGTHS) == u) for u in (2, 7)]
    for part in parts:
        if given_values[part].std(correction=0) > 1e-3:
            assert float(found[part].mean()) == pytest.approx(0.0, abs=1e-7)
            assert float(found[part].std(correction=0)) == pytest.approx(1.0, rel=1e-6)
            moved = whitened(scale * given_values - 3, MASK, LENGTHS, uid, over)
            torch.testing.assert_close(moved[part], found[part], atol=1e-5, rtol=1e-4)
    backwards = whitened(given_values[MIXED], MASK[MIXED], LENGTHS.flip(0), uid.flip(0), over)
    torch.testing.assert_close(backwards[MIXED], found, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("over", ["batch", "group"])
def test_equal_advantages_become_exactly_zero(over: Literal["batch", "group"]) -> None:
    """A rounding remainder of 0.1 - mean(0.1, ...) would become a full step after Adam's division."""
    found = whitened(torch.full((12,), 0.1), MASK, LENGTHS, torch.zeros_like(UID), over)
    assert (found == 0).all()
    assert len(whitened(VALUES[:0], MASK[:0], LENGTHS[:0], UID[:0], over)) == 0
