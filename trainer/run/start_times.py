"""Startup time of a run: seconds from the start of its process to its first generation, by part.

The controller's parts follow one another, so each is the time between two calls of ``ended``. Workers start in parallel to them;
only the time by which they are later than the controller is a part of the total. It is taken off the part in which the controller
waited for them, so that the parts always add up.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import psutil

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
