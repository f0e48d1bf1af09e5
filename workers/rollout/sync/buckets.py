"""Weights a bucket at a time: which tensors go together, and where in the bucket each is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TypeVar

T = TypeVar("T")
ALIGNMENT = 64  # bytes, of each tensor in a bucket


def buckets(items: Iterable[T], nbytes: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Runs of items of at most ``limit`` bytes together; a larger item is a bucket of its own. Reads one item ahead."""
    bucket: list[T] = []
    size = 0
    for item in items:
        if bucket and size + nbytes(item) > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append(item)
        size += nbytes(item)
    if bucket:
        yield bucket


def starts(sizes: Sequence[int], step: int) -> list[int]:
    """Where each of so many begins, at a multiple of ``step``; and at last, the size of all."""
    return list(accumulate((-(-size // step) * step for size in sizes), initial=0))
