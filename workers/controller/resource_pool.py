"""Slots for workers: how many on each node. On CUDA a slot is a GPU, on CPU a process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ResourcePool:
    """n_per_node: slots taken on each node. Ranks are counted node by node.

    room: the pool whose slots these are, from the slot first_slot of its node first_node on; other pools may be in it, and have
    the same slots. None: these are its own.
    """

    n_per_node: tuple[int, ...]
    device: Literal["cpu", "cuda"]
    name: str
    room: ResourcePool | None = None
    first_node: int = 0
    first_slot: int = 0

    def __post_init__(self) -> None:
        if not self.n_per_node or min(self.n_per_node) < 1:
            raise ValueError(f"pool {self.name!r} takes {list(self.n_per_node)} slots on its nodes: at least 1 on each is needed")

    @property
    def world_size(self) -> int:
        return sum(self.n_per_node)

    def place(self, rank: int) -> tuple[int, int]:
        """(node, slot of that node) of a rank."""
        assert 0 <= rank < self.world_size, f"rank {rank} of a pool of {self.world_size}"
        node = 0
        while rank >= self.n_per_node[node]:
            rank -= self.n_per_node[node]
            node += 1
        return self.first_node + node, self.first_slot + rank
