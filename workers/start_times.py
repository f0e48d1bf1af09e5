"""Seconds of the parts of this process's start: asked for once, when all of it is over."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class StartTimes:
    """For the main thread. A part within another has both names, joined by a slash; one that comes twice adds up.

    >>> times = StartTimes()
    >>> with times("actor"), times("read"):
    ...     pass
    >>> sorted(times.take()[1])
    ['actor', 'actor/read']
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.ready = 0.0
        """When the worker could take its first call, seconds since 1970."""
        self._within: list[str] = []

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        self._within.append(part)
        name, started = "/".join(self._within), time.perf_counter()
        try:
            yield
        finally:
            self._within.pop()
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def take(self) -> tuple[float, dict[str, float]]:
        """(``ready``, seconds by part), of what was not taken yet."""
        seconds, self.seconds = self.seconds, {}
        return self.ready, seconds


START = StartTimes()
