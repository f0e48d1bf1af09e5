"""Weights in buckets."""

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from workers.rollout.sync.buckets import buckets


@given(st.lists(st.integers(0, 9)), st.integers(0, 20))
def test_everything_comes_in_order_and_only_a_large_item_is_over_the_limit(sizes: list[int], limit: int) -> None:
    found = list(buckets(enumerate(sizes), lambda item: item[1], limit))
    assert [item for bucket in found for item in bucket] == list(enumerate(sizes))
    totals = [sum(size for _, size in bucket) for bucket in found]
    assert all(total <= limit or len(bucket) == 1 for total, bucket in zip(totals, found, strict=True))
    firsts = [bucket[0][1] for bucket in found[1:]]
    assert all(total + first > limit for total, first in zip(totals, firsts, strict=False)), "no bucket ends early"


def test_one_item_is_read_ahead() -> None:
    read = []

    def items() -> Iterator[int]:
        for i in range(6):
            read.append(i)
            yield i

    stream = buckets(items(), lambda item: 1, 2)
    assert next(stream) == [0, 1] and read == [0, 1, 2]
