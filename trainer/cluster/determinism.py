"""trainer.deterministic on the controller: environment of the workers, and warnings about nondeterministic kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from trainer.cluster.watchdog import Watchdog
from trainer.run.events import Events
from workers.controller.group import WorkerGroup
from workers.controller.rpc import worker_call
from workers.determinism import ENVIRONMENT, VLLM_ENVIRONMENT


def worker_environment(deterministic: bool, rollout: str | None = None) -> dict[str, str]:
    """Environment variables of every worker. rollout: name of the rollout engine; None: there is none."""
    if not deterministic:
        return {}
    return ENVIRONMENT | (VLLM_ENVIRONMENT if rollout == "vllm" else {})


class KernelWatch:
    """Reports each kernel that has run on a worker and may not be bitwise reproducible, once."""

    def __init__(self, groups: Callable[[], Iterable[WorkerGroup]], events: Events, watchdog: Watchdog) -> None:
        """groups: all workers, each group once; asked in every step, since a group may be replaced."""
        self.groups = groups
        self.watchdog = watchdog
        self.events = events
        self._reported: set[str] = set()

    def look(self, step: int) -> None:
        """Query all workers, and record kernels that are new as events of ``step``."""
        from workers.roles.worker import Worker  # imported late: it loads transformers

        asking = worker_call(Worker.nondeterministic_kernels)
        by_rank = [self.watchdog.call(group, "ask", "kernels", asking) for group in self.groups()]
        found = {kernel for of_group in by_rank for kernels in of_group for kernel in kernels}
        for kernel in sorted(found - self._reported):
            self.events.add(step, "not deterministic", f"{kernel} has no deterministic implementation: this run may not repeat")
        self._reported |= found
