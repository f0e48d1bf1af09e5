import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.algorithms.segments import first_in, last_in, row_ids, sum_by, sum_rows
from workers.batch import Batch, counts_in


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 7)), min_size=1, max_size=9))
def test_single_turn_rows_equal_arithmetic_with_prompt_lengths(shapes: list[tuple[int, int]]) -> None:
    """Rows of a prompt and a response that is sampled as a whole."""
    prompts, responses = torch.tensor(shapes).T
    batch = Batch(prompts + responses)
    mask = (batch.positions() >= torch.repeat_interleave(prompts, batch.lengths)).float()
    counts, first, last = (function(mask, batch.lengths) for function in (counts_in, first_in, last_in))
    assert torch.equal(counts, batch.lengths - prompts) and torch.equal(first, prompts)
    assert torch.equal(batch.offsets[:-1] + last, batch.offsets[1:] - 1)
    assert {values.dtype for values in (counts, first, last)} == {torch.int64}


@given(st.lists(st.lists(st.booleans(), max_size=8), min_size=1, max_size=9))
def test_rows_with_holes_equal_plain_python(rows: list[list[bool]]) -> None:
    mask, lengths = torch.tensor([mark for row in rows for mark in row]), torch.tensor([len(row) for row in rows])
    assert counts_in(mask, lengths).tolist() == [sum(row) for row in rows]
    assert first_in(mask, lengths).tolist() == [row.index(True) if any(row) else len(row) for row in rows]
    assert last_in(mask, lengths).tolist() == [len(row) - 1 - (row[::-1].index(True) if any(row) else 0) for row in rows]


@given(st.lists(st.lists(st.floats(-1e6, 1e6, width=32), max_size=70), min_size=1, max_size=9))
def test_sums_of_rows_are_bitwise_those_of_their_indices(rows: list[list[float]]) -> None:
    values, lengths = torch.tensor([value for row in rows for value in row]), torch.tensor([len(row) for row in rows])
    found = sum_rows(values, lengths)
    assert found.dtype == torch.float64 and torch.equal(found, sum_by(values, row_ids(lengths), len(rows)))
