"""trainer.deterministic on the controller: environment of the workers, and warnings about nondeterministic kernels."""

from __future__ import annotations

from collections.abc import Iterable

from trainer.cluster.watchdog import Watchdog
from trainer.run.events import Events
from workers.controller.group import WorkerGroup
from workers.determinism import ENVIRONMENT, VLLM_ENVIRONMENT


def worker_environment(deterministic: bool, rollout: str | None = None) -> dict[str, str]:
    """Environment variables of every worker. rollout: name of the rollout engine; None: there is none."""
    if not deterministic:
        return {}
    return ENVIRONMENT | (VLLM_ENVIRONMENT if rollout == "vllm" else {})


class KernelWatch:
    """Reports each kernel that has run on a worker and may not be bitwise reproducible, once."""

    def __init__(self, workers: Iterable[WorkerGroup], events: Events, watchdog: Watchdog) -> None:
        self.workers = {group.name: group for group in workers}  # by name: roles may share a group
        self.watchdog = watchdog
        self.events = events
        self._told: set[str] = set()

    def look(self, step: int) -> None:
        """Query all workers, and record kernels that are new as events of ``step``."""
        by_rank = [self.watchdog.call(group, "ask", "kernels", "nondeterministic_kernels") for group in self.workers.values()]
        found = {kernel for of_group in by_rank for kernels in of_group for kernel in kernels}
        for kernel in sorted(found - self._told):
            self.events.add(step, "not deterministic", f"{kernel} has no deterministic implementation: this run may not repeat")
        self._told |= found
