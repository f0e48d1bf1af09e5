"""Where on the nodes of a Ray cluster the slots of a pool are."""

from __future__ import annotations

import time
from collections.abc import Sequence

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from workers.controller.logs import tell
from workers.controller.resource_pool import ResourcePool

SLOT = "tandem_slot"  # the custom resource that stands for a GPU where there is none
PLACE_SECONDS = 30.0
LOOK_SECONDS = 0.5  # between looks at a cluster that grows


class Places:
    def __init__(self, join_seconds: float | None) -> None:
        """join_seconds: so long a cluster that was joined may take to become large enough; None: it is ours."""
        self._join_seconds = join_seconds
        self._rooms: dict[ResourcePool, PlacementGroup] = {}

    def of(self, pool: ResourcePool) -> PlacementGroup:
        """A bundle a node; those of a room that several pools are in are taken with the first of these, and kept.

        Raises ValueError, with the arithmetic, if there are not enough slots.
        """
        if pool.room is None:
            return self._taken(pool)
        if pool.room not in self._rooms:
            self._rooms[pool.room] = self._taken(pool.room)
        return self._rooms[pool.room]

    def _taken(self, pool: ResourcePool) -> PlacementGroup:
        """The ranks of a node on one node, different nodes on different ones."""
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
            remove_placement_group(place)
            raise ValueError(f"{wish}; {free} of {sum(have)} are free after {PLACE_SECONDS:g} s: others hold the rest")
        return place

    def _slots(self, kind: str, need: Sequence[int], wish: str) -> list[int]:
        """Of each node, the most first. Nodes that are still to join are waited for; what there is, is told when it changes."""
        deadline, told = time.monotonic() + (self._join_seconds or 0.0), list[int]()
        while True:
            have = sorted((int(node["Resources"].get(kind, 0)) for node in ray.nodes() if node["Alive"]), reverse=True)
            if suffices(have, need) or time.monotonic() >= deadline:
                return have
            if have != told:
                limit = f"waiting for more, {self._join_seconds:g} s at most (timeouts.join)"
                tell(f"{wish}; the nodes of this Ray have {have}: {limit}")
                told = have
            time.sleep(LOOK_SECONDS)


def suffices(have: Sequence[int], need: Sequence[int]) -> bool:
    """Slots of nodes, the most first."""
    return len(have) >= len(need) and all(has >= needs for has, needs in zip(have, need, strict=False))
