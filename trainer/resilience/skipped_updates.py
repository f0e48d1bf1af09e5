"""Updates skipped because their loss or gradient was not finite: count and report them, and dump the first batches.

The workers decide to skip, all ranks from the same reduced number. The controller only records it here; the alarm nonfinite
stops a run with too many skipped updates in a row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.resilience.alarms import SKIPPED_IN_A_ROW
from trainer.run.events import Events
from trainer.run.run_dir import SKIPPED_BATCHES, json_line, redact
from trainer.tracking.batch_file import save_batch
from workers.batch import Batch

MOST_DUMPS = 5
"""Maximum number of dumped batches in a run directory."""
SKIPPED = "skipped_updates"


class SkippedUpdates:
    """Recorder of skipped updates. in_a_row: {role: consecutive skipped updates}, saved in checkpoints."""

    def __init__(self, run_dir: Path, events: Events, config: Mapping[str, Any]) -> None:
        """config: of the run, stored in each dump."""
        self.directory = run_dir / SKIPPED_BATCHES
        self.events = events
        self.config = config
        self.in_a_row: dict[str, int] = {}
        self._pending: list[str] = []

    def record(self, role: str, step: int, mini_batch: Batch, metrics: Mapping[str, float]) -> None:
        """Record an update, applied or skipped. metrics: those of the update, with loss, grad_norm and skipped_updates."""
        if not metrics[SKIPPED]:
            self.in_a_row[role] = 0
            return
        # By role: a critic whose updates are applied must not hide an actor whose updates are not.
        self.in_a_row[role] = self.in_a_row.get(role, 0) + 1
        path = self._dump(role, step, mini_batch, metrics)
        description = f"{role}: loss {metrics['loss']:.3g}, norm of the gradient {metrics['grad_norm']:.3g}"
        self._pending.append(description if path is None else f"{description}; its batch is in {SKIPPED_BATCHES}/{path.name}")

    def report(self, step: int) -> dict[str, float]:
        """Report the skipped updates of the step as one event.

        Returns training/skipped_in_a_row, the largest current count of any role; empty if all are 0.
        """
        if self._pending:
            words = "an update was" if len(self._pending) == 1 else f"{len(self._pending)} updates were"
            self.events.add(step, "skipped", f"{words} skipped, on all ranks alike: {self._pending[0]}")
            self._pending = []
        longest = max(self.in_a_row.values(), default=0)
        return {SKIPPED_IN_A_ROW: float(longest)} if longest else {}

    def _dump(self, role: str, step: int, mini_batch: Batch, metrics: Mapping[str, float]) -> Path | None:
        """Save the first skipped batch of the step and role with its metrics (see batch_file). None if there are enough dumps."""
        path = self.directory / f"step_{step}_{role}.safetensors"
        # Further skipped mini-batches of the same step and role refer to the first one's dump.
        if path.exists():
            return path
        if len(list(self.directory.glob("*.safetensors"))) >= MOST_DUMPS:
            return None
        self.directory.mkdir(parents=True, exist_ok=True)
        facts = {"step": step, "role": role, "metrics": json.loads(json_line({**metrics})), "config": redact(self.config)}
        return save_batch(path, mini_batch, facts)

    def state(self) -> dict[str, int]:
        return dict(self.in_a_row)

    def load(self, state: dict[str, int]) -> None:
        self.in_a_row = dict(state)
