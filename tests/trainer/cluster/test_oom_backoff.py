"""Micro-batch back-off: how limits shrink, and the resulting micro-batches."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.cluster.oom_backoff import Budget
from trainer.run.events import Events
from trainer.run.run_dir import EVENTS, read_lines
from workers.plan import Limits, make_plan


def sizes_of(lengths: list[int], n_ranks: int, limits: Limits) -> list[tuple[int, int]]:
    """Rows and tokens of each micro-batch."""
    cuts = make_plan(lengths, n_ranks, limits).rows_by_rank()
    return [(len(rows), sum(lengths[row] for row in rows)) for cut in cuts for rows in cut]


def halved(budget: Budget, configured: Limits, lengths: list[int], n_ranks: int = 1) -> Limits:
    budget.halve(configured, sizes_of(lengths, n_ranks, budget.limits(configured, lengths)), max(lengths), "no memory")
    return budget.limits(configured, lengths)


def test_limit_is_half_of_the_largest_micro_batch_not_of_the_configured_limit() -> None:
    budget, many = Budget("actor"), Limits(max_tokens=10_000)
    assert halved(budget, many, [10] * 8) == Limits(max_tokens=40)
    assert halved(budget, many, [10] * 8) == Limits(max_tokens=20)
    assert halved(Budget("actor"), Limits(max_rows=64), [10] * 8, n_ranks=2) == Limits(max_rows=2)


def test_row_longer_than_the_limit_is_a_micro_batch_of_its_own() -> None:
    budget, many = Budget("actor"), Limits(max_tokens=100)
    halved(budget, many, [10] * 8)
    assert budget.limits(many, [10, 70, 20]) == Limits(max_tokens=70)
    assert budget.limits(Limits(max_tokens=30), [10, 25]) == Limits(max_tokens=30), "the configured limit is never exceeded"
    assert budget.limits(Limits(max_rows=3), [10, 70]) == Limits(max_rows=3), "a limit of tokens does not limit rows"


@pytest.mark.parametrize(("configured", "lengths"), [(Limits(max_tokens=70), [70, 30, 40]), (Limits(max_rows=1), [70, 30])])
def test_limit_never_falls_below_one_row(configured: Limits, lengths: list[int]) -> None:
    with pytest.raises(
        ValueError, match=r"^actor: memory ran out .* one row, the longest of 70 tokens \(no memory\); allow shorter"
    ):
        halved(Budget("actor"), configured, lengths)


@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=40), by_rows=st.booleans(), n_ranks=st.integers(1, 3))
def test_micro_batches_shrink_at_every_halving_to_one_row(lengths: list[int], by_rows: bool, n_ranks: int) -> None:
    configured = Limits(max_rows=64) if by_rows else Limits(max_tokens=5000)
    budget, sizes = Budget("actor"), []
    with pytest.raises(ValueError, match="one row"):
        while True:
            parts = sizes_of(lengths, n_ranks, budget.limits(configured, lengths))
            sizes.append(max(rows if by_rows else tokens for rows, tokens in parts))
            budget.halve(configured, parts, max(lengths), "no memory")
    assert all(later < earlier for earlier, later in pairwise(sizes))
    assert sizes[-1] == (1 if by_rows else max(lengths))


def test_back_off_is_reported_once_and_saved(tmp_path: Path) -> None:
    budget, events, many = Budget("actor"), Events(tmp_path), Limits(max_tokens=100)
    budget.tell(events, 1)
    halved(budget, many, [10] * 8)
    for step in (2, 3):
        budget.tell(events, step)
    (event,) = read_lines(tmp_path / EVENTS)
    text = (
        "actor: memory ran out in the update, at micro-batches of up to 80 tokens; from now on they have 40 at most (no memory)"
    )
    assert (event["step"], event["kind"], event["text"]) == (2, "out of memory", text)
    resumed = Budget("actor")
    resumed.load(Budget("actor").state())
    assert resumed.most is None
    resumed.load(budget.state())
    assert resumed.most == Limits(max_tokens=40)


def test_loading_an_older_checkpoint_does_not_raise_the_limit() -> None:
    budget, many = Budget("actor"), Limits(max_tokens=100)
    halved(budget, many, [10] * 8)
    for earlier in ({}, {"max_tokens": 60, "max_rows": None}):
        budget.load(earlier)
        assert budget.most == Limits(max_tokens=40)
