"""Phases of a step: the seconds that each took, and when it was under way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

WHOLE_STEP = "step"
"""The phase that all others lie in, save those of AFTER_STEP."""

AFTER_STEP = ("testing", "save_checkpoint")

WITHIN = ("verify_weights", "engine_sleep", "engine_wake", "release_memory", "gc")
"""Times of workers, which are parts of other phases."""


@dataclass(frozen=True, slots=True)
class Span:
    """When a phase was under way: start and end in seconds since 1970. pools: whose processes worked; none: the controller's."""

    phase: str
    pools: tuple[str, ...]
    start: float
    end: float


class Phases:
    """Seconds of each named phase. A phase that runs twice adds up; one that raises is counted too. Phases of pools that work at
    the same time may come from several threads, each its own.

    >>> phases = Phases()
    >>> with phases("gen"):
    ...     pass
    >>> list(phases.seconds), len(phases.spans)
    (['gen'], 1)
    """

    def __init__(self, pools: Mapping[str, tuple[str, ...]] | None = None) -> None:
        """pools: that work in a phase."""
        self.pools = pools or {}
        self.seconds: dict[str, float] = {}
        self.spans: list[Span] = []
        self.under_way: dict[str, float] = {}
        """Phases that have begun, the innermost last: time.perf_counter() then."""
        self.progress: dict[str, Callable[[], object]] = {}
        """By phase: how far its work is, for the display."""
        self._began = time.time() - time.perf_counter()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = self.under_way[name] = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            self.under_way.pop(name, None)
            self.seconds[name] = self.seconds.get(name, 0.0) + end - start
            self.spans.append(Span(name, self.pools.get(name, ()), self._began + start, self._began + end))

    def clear(self) -> None:
        """Before a step."""
        self.seconds.clear()
        self.spans.clear()
