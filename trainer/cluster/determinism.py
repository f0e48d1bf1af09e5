"""trainer.deterministic from the controller's side: what the workers are started with, and what of it does not hold."""

from __future__ import annotations

from collections.abc import Iterable

from trainer.cluster.watchdog import Watchdog
from trainer.run.events import Events
from workers.controller.group import WorkerGroup
from workers.determinism import ENVIRONMENT, VLLM_ENVIRONMENT


def worker_environment(deterministic: bool, rollout: str | None = None) -> dict[str, str]:
    """Of every worker. rollout: the engine's name, None: there is none."""
    if not deterministic:
        return {}
    return ENVIRONMENT | (VLLM_ENVIRONMENT if rollout == "vllm" else {})


class KernelWatch:
    """Tells once of each kernel that has run on a worker and may not give the same bits again."""

    def __init__(self, hosts: Iterable[WorkerGroup], events: Events, watchdog: Watchdog) -> None:
        self.hosts = {group.name: group for group in hosts}  # one may be that of several roles
        self.watchdog = watchdog
        self.events = events
        self._told: set[str] = set()

    def look(self, step: int) -> None:
        by_rank = [self.watchdog.call(group, "ask", "kernels", "doubtful_kernels") for group in self.hosts.values()]
        found = {kernel for of_group in by_rank for kernels in of_group for kernel in kernels}
        for kernel in sorted(found - self._told):
            self.events.add(step, "not deterministic", f"{kernel} has no deterministic implementation: this run may not repeat")
        self._told |= found
