"""Placement of a pool's slots on the nodes of a Ray cluster."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from workers.controller.logs import tell
from workers.controller.resource_pool import ResourcePool

SLOT = "tandem_slot"  # custom resource that stands for a GPU on nodes without one
PLACE_SECONDS = 30.0
GPUS_SECONDS = 300.0  # limit for the tasks that report the GPUs of each node: their processes start first
LOOK_SECONDS = 0.5  # interval between polls of a cluster that grows


@dataclass(frozen=True, slots=True)
class Place:
    """Reserved slots: one bundle of ``group`` per node.

    gpus: by node, the ids of its GPUs as CUDA_VISIBLE_DEVICES takes them; None if a slot is not a GPU.
    """

    group: PlacementGroup
    gpus: tuple[tuple[str, ...], ...] | None

    def environment(self, node: int) -> dict[str, str]:
        """Let workers see all GPUs of the run on their node, in the order of its slots, and no others.

        On a cluster that also runs other jobs, GPU 0 of the node may belong to one of them.
        """
        return {} if self.gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus[node])}


class Places:
    """Placement groups of the pools."""

    def __init__(self, join_seconds: float | None) -> None:
        """join_seconds: how long a cluster that was joined may take to become large enough; None: it was not joined."""
        self._join_seconds = join_seconds
        self._rooms: dict[ResourcePool, Place] = {}

    def of(self, pool: ResourcePool) -> Place:
        """Reserve the slots of a pool, one bundle per node. Raises ValueError, with the arithmetic, if there are not enough.

        The slots of a room that several pools share are reserved with the first of these pools, and kept.
        """
        if pool.room is None:
            return self._taken(pool)
        if pool.room not in self._rooms:
            self._rooms[pool.room] = self._taken(pool.room)
        return self._rooms[pool.room]

    def _taken(self, pool: ResourcePool) -> Place:
        """Reserve slots: ranks of one node on one node, different nodes on different ones."""
        kind, what = ("GPU", "GPUs") if pool.device == "cuda" else (SLOT, f"slots ({SLOT})")
        need = sorted(pool.n_per_node, reverse=True)
        wish = f"pool {pool.name!r} needs {pool.world_size} {what}, {need} on {len(need)} node(s)"
        have = self._slots(kind, need, wish)
        if not suffices(have, need):
            waited = f" after {self._join_seconds:g} s (timeouts.join)" if self._join_seconds else ""
            joined = self._join_seconds is not None and kind == SLOT
            hint = f"; nodes get slots by `ray start --resources='{{\"{SLOT}\": n}}'`" if joined else ""
            raise ValueError(f"{wish}; the nodes of this Ray have {have}, {sum(have)} together{waited}{hint}")
        strategy = "STRICT_SPREAD" if len(need) > 1 else "STRICT_PACK"
        place = placement_group([{kind: n} for n in pool.n_per_node], strategy=strategy)
        if not place.wait(PLACE_SECONDS):
            free = int(ray.available_resources().get(kind, 0))
            # A pending request would take the slots as soon as others release them.
            remove_placement_group(place)
            raise ValueError(f"{wish}; {free} of {sum(have)} are free after {PLACE_SECONDS:g} s: others hold the rest")
        return Place(place, gpus_of(place, pool.n_per_node) if pool.device == "cuda" else None)

    def _slots(self, kind: str, need: Sequence[int], wish: str) -> list[int]:
        """Slots of each node, largest number first. Waits for nodes that are still to join, and reports every change."""
        deadline, reported = time.monotonic() + (self._join_seconds or 0.0), list[int]()
        while True:
            have = sorted((int(node["Resources"].get(kind, 0)) for node in ray.nodes() if node["Alive"]), reverse=True)
            if suffices(have, need) or time.monotonic() >= deadline:
                return have
            if have != reported:
                limit = f"waiting for more, {self._join_seconds:g} s at most (timeouts.join)"
                tell(f"{wish}; the nodes of this Ray have {have}: {limit}")
                reported = have
            time.sleep(LOOK_SECONDS)


def gpus_of(group: PlacementGroup, n_per_node: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """By bundle, the ids of the GPUs that Ray reserved for it: only a task that takes all of them can read them."""
    asked = []
    for node, n in enumerate(n_per_node):
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node)
        asked.append(ray.remote(own_gpus).options(num_cpus=0, num_gpus=n, scheduling_strategy=strategy).remote())
    try:
        return tuple(ray.get(asked, timeout=GPUS_SECONDS))
    except ray.exceptions.GetTimeoutError as error:
        remove_placement_group(group)
        raise ValueError(
            f"Ray did not start a task on its own GPUs within {GPUS_SECONDS:g} s: see `ray status` and its logs"
        ) from error


def own_gpus() -> tuple[str, ...]:
    """Ids of the GPUs of the calling task or actor, in numerical order."""
    # By length first: as strings, 10 would come before 9.
    return tuple(sorted(map(str, ray.get_gpu_ids()), key=lambda gpu: (len(gpu), gpu)))


def suffices(have: Sequence[int], need: Sequence[int]) -> bool:
    """Whether the nodes have enough slots. have, need: slots per node, largest number first."""
    return len(have) >= len(need) and all(has >= needs for has, needs in zip(have, need, strict=False))
