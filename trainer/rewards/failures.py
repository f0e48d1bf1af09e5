"""Failed rewards: how many there were in a step, and the first of each kind as an event."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.events import Events
from trainer.rewards.scoring import Score

MOST_REPORTED = 10
"""Kinds of failure that a run reports: a function may raise another message each time."""


class Failures:
    def __init__(self, events: Events) -> None:
        self._events = events
        self._reported: set[str] = set()
        self.start_step()

    def start_step(self) -> None:
        self._asked = self._failed = self._timed_out = 0

    def add(self, step: int, purpose: str, scores: Sequence[Score]) -> None:
        """Counts them. The first failure of each kind becomes an event: on the console, in events.jsonl and in the report."""
        errors = [score.error for score in scores if score.error is not None]
        self._asked += len(scores)
        self._failed += len(errors)
        self._timed_out += sum(score.timed_out for score in scores)
        for error in errors:
            if len(self._reported) < MOST_REPORTED and kind_of(error) not in self._reported:
                self._reported.add(kind_of(error))
                self._events.add(step, "reward", f"{len(errors)} of {len(scores)} rewards of {purpose} failed: {error}")

    def metrics(self) -> dict[str, float]:
        """Shares of all responses of the step that were to be scored: greedy baselines and groups that were dropped included."""
        asked = max(self._asked, 1)
        return {"reward/failed_share": self._failed / asked, "reward/timed_out_share": self._timed_out / asked}


def kind_of(error: str) -> str:
    """How the error begins and the place that it ends with, without the message between them."""
    return f"{error[:12]} {error.rpartition('(')[2]}"
