"""Parts of a step at the same time, where they are the work of different processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import TypeVar

from configs.pools import Placement
from trainer.run.timing import Phases
from workers.controller.group import WorkerGroup

AT_WORK = {
    "gen": ("rollout",), "reward_model": ("reward",), "old_log_prob": ("actor",), "ref": ("ref",), "values": ("critic",),
    "update_actor": ("actor",), "update_critic": ("critic",), "sync": ("actor", "rollout"), "testing": ("rollout",),
    "save_checkpoint": ("actor", "critic"),
}  # fmt: skip
"""The roles that work in a phase; none in one that is the controller's."""
Found = TypeVar("Found")
END_SECONDS = 20.0
"""So long the others may take to come to an end, after their workers were ended."""


class Together:
    def __init__(self, hosts: Mapping[str, WorkerGroup], n_gpus: int) -> None:
        """hosts: of each role; roles that share processes have the same. n_gpus: that the run works on."""
        self._hosts = hosts
        self.n_gpus = n_gpus

    def __call__(self, parts: Mapping[str, Callable[[], Found]]) -> dict[str, Found]:
        """By role, what its part returns. Parts of roles that share processes come one after the other, as they stand here; the
        others at the same time, each pool's in a thread of its own.

        Raises the first error at once. What is still under way then is given up with the workers that it runs on: a step that
        lost a part is lost.
        """
        queues: dict[str, list[str]] = {}
        for role in parts:
            queues.setdefault(self._hosts[role].name, []).append(role)
        if len(queues) <= 1:
            return {role: part() for role, part in parts.items()}
        ended: SimpleQueue[tuple[str, dict[str, Found] | BaseException]] = SimpleQueue()

        def work(pool: str, roles: list[str]) -> None:
            try:
                ended.put((pool, {role: parts[role]() for role in roles}))
            except BaseException as error:  # whoever waits gets it
                ended.put((pool, error))

        threads = {
            pool: threading.Thread(target=work, args=(pool, roles), name=pool, daemon=True) for pool, roles in queues.items()
        }
        found: dict[str, Found] = {}
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
            self._give_up({pool: queues[pool][0] for pool in waiting})
            for thread in waiting.values():
                thread.join(END_SECONDS)
            raise
        return {role: found[role] for role in parts}

    def _give_up(self, pools: Mapping[str, str]) -> None:
        """pools: with a role of each. Their calls end with their workers: no thread is left to talk to a Ray that has ended."""
        for role in pools.values():
            self._hosts[role].shutdown()


def phases_of(place: Placement) -> Phases:
    """That know in which pools they are."""
    return Phases({phase: tuple(dict.fromkeys(place.pool(role).name for role in roles)) for phase, roles in AT_WORK.items()})
