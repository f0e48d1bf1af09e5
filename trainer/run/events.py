"""What happens to a run beside its steps: alarms, restarts, rollbacks, saves that failed. Kept for the report, and told once."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import NotRequired, TypedDict

from configs.base.secrets import hidden
from trainer.run.run_dir import EVENTS, json_line
from workers.controller.logs import tell


class Event(TypedDict):
    """step: the training step it happened in. kind: a word, the same for like events. text: for people, one line. seconds: of the
    parts of what took long, by name, for programs."""

    step: int
    time: str
    kind: str
    text: str
    seconds: NotRequired[dict[str, float]]


class Events:
    """events.jsonl of a run directory. It tells the whole story: resuming cuts nothing off."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / EVENTS

    def add(self, step: int, kind: str, text: str, seconds: Mapping[str, float] | None = None) -> None:
        """One line on stderr and in the file, in the kernel's hands on return; if the disk takes nothing, on stderr alone."""
        event = Event(step=step, time=time.strftime("%Y-%m-%d %H:%M:%S"), kind=kind, text=" ".join(hidden(text).split()))
        if seconds is not None:
            event["seconds"] = {name: round(spent, 3) for name, spent in seconds.items()}
        tell(f"{kind}: step {step}: {event['text']}")
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json_line({**event}))
        except OSError as error:
            tell(f"{self.path}: {error}")
