"""Phases of a step: duration in seconds, and start and end times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

WHOLE_STEP = "step"
"""The phase that contains all others except AFTER_STEP."""

AFTER_STEP = ("testing", "save_checkpoint")
"""Phases outside the step: they are not part of its seconds."""

WITHIN = ("verify_weights", "engine_sleep", "engine_wake", "release_memory", "gc")
"""Times measured on workers. They are parts of other phases, so they must not be added to them."""


@dataclass(frozen=True, slots=True)
class Span:
    """Start and end of a phase in seconds since 1970. pools: the pools whose workers were active; empty: only the controller."""

    phase: str
    pools: tuple[str, ...]
    start: float
    end: float


class Phases:
    """Timer of named phases. Times of a phase that runs twice are summed; a phase that raises is counted too.

    Pools that work concurrently may use it from several threads, if each thread uses its own phase names.

    >>> phases = Phases()
    >>> with phases("gen"):
    ...     pass
    >>> list(phases.seconds), len(phases.spans)
    (['gen'], 1)
    """

    def __init__(self, pools: Mapping[str, tuple[str, ...]] | None = None) -> None:
        """pools: {phase: pools whose workers are active in it}."""
        self.pools = pools or {}
        self.seconds: dict[str, float] = {}
        self.spans: list[Span] = []
        self.under_way: dict[str, float] = {}
        """time.perf_counter() at the start of each active phase, the innermost last."""
        self.progress: dict[str, Callable[[], object]] = {}
        """{phase: callable that returns its progress}, for the display."""
        # Durations use perf_counter, which is monotonic. This offset, taken once, turns it into wall time for the timeline.
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
        """Reset the times. Called before each step."""
        self.seconds.clear()
        self.spans.clear()
