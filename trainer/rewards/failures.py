"""Count failed rewards per step, and record the first failure of each kind as an event."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.rewards.scoring import Score
from trainer.run.events import Events

MOST_REPORTED = 10
"""Maximum number of kinds of failure reported per run: a function may raise a different message each time."""


class Failures:
    def __init__(self, events: Events) -> None:
        self._events = events
        self._reported: set[str] = set()
        self.start_step()

    def start_step(self) -> None:
        self._asked = self._failed = self._timed_out = 0

    def add(self, step: int, purpose: str, scores: Sequence[Score]) -> None:
        """Count the scores and failures. The first failure of each kind becomes an event (console, events.jsonl, report)."""
        errors = [score.error for score in scores if score.error is not None]
        self._asked += len(scores)
        self._failed += len(errors)
        self._timed_out += sum(score.timed_out for score in scores)
        for error in errors:
            if len(self._reported) < MOST_REPORTED and kind_of(error) not in self._reported:
                self._reported.add(kind_of(error))
                self._events.add(step, "reward", f"{len(errors)} of {len(scores)} rewards of {purpose} failed: {error}")

    def metrics(self) -> dict[str, float]:
        """Fractions of all responses scored in the step, including greedy baselines and dropped groups."""
        asked = max(self._asked, 1)
        return {"reward/failed_share": self._failed / asked, "reward/timed_out_share": self._timed_out / asked}


def kind_of(error: str) -> str:
    """Kind of an error: the start of its text and the location at its end, without the message in between."""
    return f"{error[:12]} {error.rpartition('(')[2]}"
