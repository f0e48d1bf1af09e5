"""Events of a run other than its steps (alarms, restarts, rollbacks, failed saves): printed once, and kept for the report."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TypedDict

from configs.base.secrets import hidden
from trainer.run.run_dir import EVENTS, LineWriter, json_line
from workers.controller.logs import tell


class Event(TypedDict):
    """One line of events.jsonl.

    step: training step in which it happened. time: local time. kind: short label, equal for events of the same sort. text: one
    line for people.
    """

    step: int
    time: str
    kind: str
    text: str


class Events:
    """Writer of events.jsonl in a run directory. Resuming removes no event, so the file holds the complete history of the run."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / EVENTS

    def add(self, step: int, kind: str, text: str) -> None:
        """Print the event to stderr and append it to the file, flushed to the kernel on return.

        If the file cannot be written, the event and the error are printed only.
        """
        # Texts quote errors and commands: hidden() masks credentials, split() joins several lines into one.
        event = Event(step=step, time=time.strftime("%Y-%m-%d %H:%M:%S"), kind=kind, text=" ".join(hidden(text).split()))
        tell(f"{kind}: step {step}: {event['text']}")
        # An event may report a failing disk; a second failure here must not end the run.
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = LineWriter(self.path)
            file.write(json_line({**event}))
            file.close()
        except OSError as error:
            tell(f"{self.path}: {error}")
