"""Buckets of weights: group tensors up to a size limit, and lay them out in one buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TypeVar

T = TypeVar("T")
ALIGNMENT = 64  # bytes; each tensor in a bucket starts at a multiple of it


def buckets(items: Iterable[T], nbytes: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Group consecutive items into lists of at most ``limit`` bytes; a larger item is a bucket of its own.

    Reads one item ahead of the bucket that it yields. The caller should clear the list after use: otherwise its own reference
    keeps these tensors alive while the next bucket is collected.
    """
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
    """Offsets of consecutive items of these sizes, each a multiple of ``step``; the last element is the total size."""
    return list(accumulate((-(-size // step) * step for size in sizes), initial=0))
