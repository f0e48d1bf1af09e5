"""The task of the bench: digits sorted by swaps that the response shows."""

from hypothesis import given
from hypothesis import strategies as st

from scripts.bench.async_accuracy import DIGITS, LONGEST, worked


@given(st.text("0123456789", min_size=DIGITS, max_size=DIGITS))
def test_rows_swap_neighbours_until_the_digits_are_sorted(digits: str) -> None:
    text = worked(digits)
    rows = text.split("=")
    assert rows[-1] == "".join(sorted(digits))
    for before, after in zip([digits, *rows], rows, strict=False):
        differ = [i for i in range(DIGITS) if before[i] != after[i]]
        if differ:
            assert differ == [differ[0], differ[0] + 1] and after[differ[0]] < before[differ[0]]
        else:
            assert rows == [digits]


def test_longest_response() -> None:
    assert len(worked("543210")) + 1 == 105 <= LONGEST and worked("012345") == "012345"
