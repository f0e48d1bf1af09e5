"""Seconds spent in each part of this process's start; read once, after the start is complete."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class StartTimes:
    """Nested timers of the main thread. A nested part is named outer/inner; a repeated part accumulates.

    >>> times = StartTimes()
    >>> with times("actor"), times("read"):
    ...     pass
    >>> sorted(times.take()[1])
    ['actor', 'actor/read']
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.ready = 0.0
        """Time at which the worker could accept its first call, seconds since 1970."""
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
        """Return (``ready``, seconds by part) and reset the parts."""
        seconds, self.seconds = self.seconds, {}
        return self.ready, seconds


START = StartTimes()
