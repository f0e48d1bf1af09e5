"""Concurrent execution of a step's parts, where they run on different worker pools."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import TypeVar

from configs.schema.placement import Placement
from trainer.run.timing import Phases
from workers.controller.group import WorkerGroup

AT_WORK = {
    "gen": ("rollout",), "reward_model": ("reward",), "old_log_prob": ("actor",), "ref": ("ref",), "values": ("critic",),
    "update_actor": ("actor",), "update_critic": ("critic",), "sync": ("actor", "rollout"), "testing": ("rollout",),
    "save_checkpoint": ("actor", "critic"),
}  # fmt: skip
"""Roles that are active in a phase; phases of the controller itself are missing."""
R = TypeVar("R")
END_SECONDS = 20.0
"""Seconds for the other parts to return, after their workers were ended."""


class Together:
    """Runs parts of a step, by role: pools work concurrently, roles of one pool in turn."""

    def __init__(self, workers: Mapping[str, WorkerGroup], n_gpus: int) -> None:
        """workers: worker group of each role, the same for roles that share processes. n_gpus: GPUs of the run."""
        self.workers = workers
        self.n_gpus = n_gpus

    def __call__(self, parts: Mapping[str, Callable[[], R]]) -> dict[str, R]:
        """Call all parts; returns {role: result}.

        Parts of roles in the same processes are called one after the other, in the given order; different pools run
        concurrently, each in a thread of its own. Raises the first error at once. Parts that are still running then are
        abandoned, and their workers are ended: a step that lost a part is lost.
        """
        queues: dict[str, list[str]] = {}
        for role in parts:
            queues.setdefault(self.workers[role].name, []).append(role)
        # One pool: nothing can run concurrently, so no thread is needed.
        if len(queues) <= 1:
            return {role: part() for role, part in parts.items()}
        ended: SimpleQueue[tuple[str, dict[str, R] | BaseException]] = SimpleQueue()

        def work(pool: str, roles: list[str]) -> None:
            try:
                ended.put((pool, {role: parts[role]() for role in roles}))
            except BaseException as error:  # raised by the thread that waits for the results
                ended.put((pool, error))

        # daemon: a part that was abandoned must not keep the process alive.
        threads = {
            pool: threading.Thread(target=work, args=(pool, roles), name=pool, daemon=True) for pool, roles in queues.items()
        }
        found: dict[str, R] = {}
        waiting = dict(threads)
        try:
            for thread in threads.values():
                thread.start()
            while waiting:
                pool, result = ended.get()
                del waiting[pool]
                if isinstance(result, BaseException):
                    raise result
                found |= result
        except BaseException:
            self._end_workers({pool: queues[pool][0] for pool in waiting})
            for thread in waiting.values():
                thread.join(END_SECONDS)
            raise
        # In the order of the parts, not in that of their ends.
        return {role: found[role] for role in parts}

    def _end_workers(self, pools: Mapping[str, str]) -> None:
        """End the workers of pools that are still running. pools: {pool: one of its roles}.

        Their calls end with the workers: no thread is left that uses a Ray instance after its end.
        """
        for role in pools.values():
            self.workers[role].shutdown()


def phases_of(place: Placement) -> Phases:
    """Phases that know the pools they run in."""
    return Phases({phase: tuple(dict.fromkeys(place.pool(role).name for role in roles)) for phase, roles in AT_WORK.items()})
