"""Slots for workers on each node. A slot is a GPU on CUDA and a process on CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True)
class ResourcePool:
    """Slots of one worker group. Ranks are numbered node by node.

    n_per_node: slots on each node. room: the pool that owns these slots, which start at slot ``first_slot`` of its node
    ``first_node``; other pools may be in the same room, and use the same slots. None: the slots are this pool's own. ranks:
    those of the slots that the worker group has, see ``parts``; None: all. Raises ValueError if a node has no slot.
    """

    n_per_node: tuple[int, ...]
    device: Literal["cpu", "cuda"]
    name: str
    room: ResourcePool | None = None
    first_node: int = 0
    first_slot: int = 0
    ranks: range | None = None

    def __post_init__(self) -> None:
        if not self.n_per_node or min(self.n_per_node) < 1:
            raise ValueError(f"pool {self.name!r} takes {list(self.n_per_node)} slots on its nodes: at least 1 on each is needed")

    @property
    def world_size(self) -> int:
        return sum(self.n_per_node) if self.ranks is None else len(self.ranks)

    @property
    def n_parts(self) -> int:
        """Number of parts of this size in the pool."""
        return sum(self.n_per_node) // self.world_size

    def parts(self, size: int) -> list[ResourcePool]:
        """Parts of ``size`` consecutive ranks, each for a worker group of its own; this pool if it is the only one."""
        ranks = range(self.world_size)
        if size == len(ranks):
            return [self]
        starts = enumerate(ranks[::size])
        return [replace(self, name=f"{self.name}.{number}", ranks=ranks[start : start + size]) for number, start in starts]

    def place(self, rank: int) -> tuple[int, int]:
        """(node, slot on that node) of a rank; in a room, by the numbers of the room."""
        assert 0 <= rank < self.world_size, f"rank {rank} of a pool of {self.world_size}"
        rank = rank if self.ranks is None else self.ranks[rank]
        node = 0
        while rank >= self.n_per_node[node]:
            rank -= self.n_per_node[node]
            node += 1
        return self.first_node + node, self.first_slot + rank
