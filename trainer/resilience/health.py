"""What watches a run's health: alarms on its metrics, skipped updates, nondeterministic kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainer.cluster.determinism import KernelWatch
from trainer.resilience.alarms import Alarm, Alarms, react
from trainer.resilience.skipped_updates import Skips
from trainer.run.events import Events


@dataclass
class Health:
    """kernels is None unless ``trainer.deterministic``."""

    alarms: Alarms
    skips: Skips
    kernels: KernelWatch | None
    events: Events

    def check(self, step: int, metrics: Mapping[str, float]) -> Alarm | None:
        """Evaluate all alarms on a step's metrics. Returns the alarm that asks for a rollback, if any.

        Raises Found if an alarm asks to stop.
        """
        if self.kernels is not None:
            self.kernels.look(step)
        return react(self.alarms.see(step, metrics), self.events, step)
