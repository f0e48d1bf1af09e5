"""Per-step health checks of a run: alarms on metrics, skipped updates, nondeterministic kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainer.cluster.determinism import KernelWatch
from trainer.resilience.alarms import Alarm, Alarms, react
from trainer.resilience.skipped_updates import SkippedUpdates
from trainer.run.events import Events


@dataclass
class Health:
    """The health checks of an attempt. kernels: None unless ``trainer.deterministic``."""

    alarms: Alarms
    skipped_updates: SkippedUpdates
    kernels: KernelWatch | None
    events: Events

    def check(self, step: int, metrics: Mapping[str, float]) -> Alarm | None:
        """Evaluate all alarms on a step's metrics. Returns the alarm that requests a rollback, if any.

        Raises CheckFailed if an alarm requests a stop.
        """
        # Before the alarms: the warnings of this step are reported even if an alarm ends the run.
        if self.kernels is not None:
            self.kernels.look(step)
        return react(self.alarms.evaluate(step, metrics), self.events, step)
