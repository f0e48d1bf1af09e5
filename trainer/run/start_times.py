"""How long a run takes from the start of its process to its first generation, part by part."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import psutil

FIRST, WORKERS = "program", "workers"
_process_began: list[float] = []


def program_began() -> None:
    """This process was started for the next run: its start counts from there. Without, it counts from ``Start()``."""
    _process_began[:] = [psutil.Process().create_time()]


class Start:
    """Parts follow one another on the controller; the last one ends as the first generation begins.

    program: Python, the configuration and imports. workers: what of their start lasted longer than the controller's own.
    """

    def __init__(self) -> None:
        self._ends: dict[str, float] = {}
        self._began = _process_began.pop() if _process_began else time.time()
        self.ended(FIRST)

    def ended(self, part: str) -> None:
        self._ends[part] = time.time()

    def seconds(self, workers: Sequence[tuple[float, Mapping[str, float]]]) -> dict[str, float]:
        """total, each part, and ``ranks/<part>`` of the slowest rank. workers: StartTimes.take of every rank."""
        parts = dict[str, float]()
        ready = max((at for at, _ in workers), default=0.0)
        before, waits = self._began, "data"
        for part, end in self._ends.items():
            parts[part], before = end - before, end
            if part == waits:
                following = min((other for other in self._ends.values() if other > end), default=end)
                parts[WORKERS] = before_ready = min(max(0.0, ready - end), following - end)
                before += before_ready
        for _, seconds in workers:
            for name, spent in seconds.items():
                parts[f"ranks/{name}"] = max(spent, parts.get(f"ranks/{name}", 0.0))
        return {"total": before - self._began} | parts


def sentence(seconds: Mapping[str, float]) -> str:
    """One line for the console: the total, and the controller's parts of a second or more. The event has all of them."""
    parts = [f"{name} {spent:.1f}" for name, spent in seconds.items() if "/" not in name and name != "total" and spent >= 1.0]
    return f"{seconds['total']:.1f} s to the first generation" + (f": {', '.join(parts)}" if parts else "")
