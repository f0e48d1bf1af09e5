"""Times of a run: phases of a step with their start and end, and the parts of the startup.

The startup lasts from the start of the process to the first generation. The controller's parts follow one another, so each is the
time between two calls of ``Start.ended``. Workers start in parallel to them; only the time by which they are later than the
controller is a part of the total. It is taken off the part in which the controller waited for them, so that the parts add up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

WHOLE_STEP = "step"
"""The phase that contains all others except AFTER_STEP."""

AFTER_STEP = ("testing", "save_checkpoint")
"""Phases outside the step: they are not part of its seconds."""

WITHIN = (
    "verify_weights",
    "engine_sleep",
    "engine_wake",
    "release_memory",
    "gc",
    "compile",
    "recompute",
    "rollout_idle",
    "trainer_stall",
    "engine_stall",
)
"""Times that are parts of other phases, so they must not be added to them."""

AGENTS = "agents/"
"""Prefix of times of tools and environments, which are within the generation, and overlap."""


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


FIRST, WORKERS = "program", "workers"
_process_began: list[float] = []


def program_began() -> None:
    """Count the next run from the start of this process, including imports. Otherwise it counts from the call of ``Start()``."""
    # Start() pops the entry: a second run in the same process must not count the first one.
    _process_began[:] = [psutil.Process().create_time()]


class Start:
    """Timer of the consecutive parts on the controller; the last one ends when the first generation begins.

    Two parts have fixed names. program: Python, configuration and imports. workers: time by which the start of the workers
    outlasted the controller's own work.
    """

    def __init__(self) -> None:
        self._ends: dict[str, float] = {}
        self._began = _process_began.pop() if _process_began else time.time()
        self.ended(FIRST)

    def ended(self, part: str) -> None:
        self._ends[part] = time.time()

    def seconds(self, workers: Sequence[tuple[float, Mapping[str, float]]]) -> dict[str, float]:
        """Seconds of the total, of each part, and of ``ranks/<part>`` on its slowest rank.

        workers: (time at which the rank was ready, its parts) of every rank, as StartTimes.take returns them.
        """
        parts = dict[str, float]()
        ready = max((at for at, _ in workers), default=0.0)
        before, waits = self._began, "data"
        for part, end in self._ends.items():
            parts[part], before = end - before, end
            # The controller waits for the workers after "data". Their delay becomes a part of its own and is subtracted from the
            # next part; it is limited to the length of that part, so that no part is negative.
            if part == waits:
                following = min((other for other in self._ends.values() if other > end), default=end)
                parts[WORKERS] = before_ready = min(max(0.0, ready - end), following - end)
                before += before_ready
        # A maximum per part: the slowest rank of one part need not be that of another, so these do not add up to the total.
        for _, seconds in workers:
            for name, spent in seconds.items():
                parts[f"ranks/{name}"] = max(spent, parts.get(f"ranks/{name}", 0.0))
        return {"total": before - self._began} | parts


def sentence(seconds: Mapping[str, float]) -> str:
    """One line for the console: the total, and the controller's parts of a second or more. logs/start.json has all of them."""
    parts = [f"{name} {spent:.1f}" for name, spent in seconds.items() if "/" not in name and name != "total" and spent >= 1.0]
    return f"{seconds['total']:.1f} s to the first generation" + (f": {', '.join(parts)}" if parts else "")
