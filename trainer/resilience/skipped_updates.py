"""Updates that were skipped because their loss or gradient was not finite: counted, told, and the first batches kept."""

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
"""In a run directory."""
SKIPPED = "skipped_updates"


class Skips:
    """in_a_row: updates of each role that were skipped since the last one that was not."""

    def __init__(self, run_dir: Path, events: Events, config: Mapping[str, Any]) -> None:
        """config: the run's, for the dumps."""
        self.directory = run_dir / SKIPPED_BATCHES
        self.events = events
        self.config = config
        self.in_a_row: dict[str, int] = {}
        self._told: list[str] = []

    def see(self, role: str, step: int, mini_batch: Batch, metrics: Mapping[str, float]) -> None:
        """An update that was applied, or not. metrics: what it told, loss, grad_norm and skipped_updates among it."""
        if not metrics[SKIPPED]:
            self.in_a_row[role] = 0
            return
        self.in_a_row[role] = self.in_a_row.get(role, 0) + 1
        path = self._dump(role, step, mini_batch, metrics)
        said = f"{role}: loss {metrics['loss']:.3g}, norm of the gradient {metrics['grad_norm']:.3g}"
        self._told.append(said if path is None else f"{said}; its batch is in {SKIPPED_BATCHES}/{path.name}")

    def tell(self, step: int) -> dict[str, float]:
        """The step's event, if there was a skipped update. Metrics: the longest row that is not over, if there is one."""
        if self._told:
            words = "an update was" if len(self._told) == 1 else f"{len(self._told)} updates were"
            self.events.add(step, "skipped", f"{words} skipped, on all ranks alike: {self._told[0]}")
            self._told = []
        longest = max(self.in_a_row.values(), default=0)
        return {SKIPPED_IN_A_ROW: float(longest)} if longest else {}

    def _dump(self, role: str, step: int, mini_batch: Batch, metrics: Mapping[str, float]) -> Path | None:
        """The step's first of the role, and what was told of it; see batch_file. None: there are enough."""
        path = self.directory / f"step_{step}_{role}.safetensors"
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
