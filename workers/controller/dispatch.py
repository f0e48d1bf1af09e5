"""Distribution of arguments to ranks, and collection of results by shard. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of one rank: (positional, keyword)."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Assignment of shards to the ranks of a group.

    The tp and pp ranks of one replica get the same shard, and one of them returns its result. shard_of_rank[r]: shard of rank
    r. output_ranks[s]: rank that returns the result of shard s. Raises ValueError if a shard has no rank, or if the rank that
    answers for a shard does not hold it.
    """

    shard_of_rank: tuple[int, ...]
    output_ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        shards = set(self.shard_of_rank)
        if shards != set(range(self.n_shards)):
            raise ValueError(f"the mesh has {self.n_shards} answering ranks, its ranks get shards {sorted(shards)}")
        for shard, rank in enumerate(self.output_ranks):
            if not 0 <= rank < self.world_size or self.shard_of_rank[rank] != shard:
                holders = [r for r, held in enumerate(self.shard_of_rank) if held == shard]
                raise ValueError(f"rank {rank} cannot answer for shard {shard}: ranks {holders} hold it")

    @property
    def world_size(self) -> int:
        return len(self.shard_of_rank)

    @property
    def n_shards(self) -> int:
        return len(self.output_ranks)


class Sharded(list[Any]):
    """Argument with one item per shard. Any other argument goes to all ranks unchanged."""


def split(mesh: Mesh, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Call]:
    """Arguments of each rank. Raises ValueError if a Sharded argument does not have one item per shard.

    Ranks with the same shard get the same objects.
    """
    for name, value in (*enumerate(args), *kwargs.items()):
        if isinstance(value, Sharded) and len(value) != mesh.n_shards:
            label = repr(name) if isinstance(name, str) else str(name)
            raise ValueError(
                f"argument {label} has {len(value)} items, the mesh {mesh.n_shards} shards over {mesh.world_size} ranks"
            )

    def pick(value: Any, shard: int) -> Any:
        return value[shard] if isinstance(value, Sharded) else value

    # One call per shard, not per rank: a backend packs an argument once for all ranks that get the same object.
    by_shard: list[Call] = [
        (tuple(pick(value, shard) for value in args), {name: pick(value, shard) for name, value in kwargs.items()})
        for shard in range(mesh.n_shards)
    ]
    return [by_shard[shard] for shard in mesh.shard_of_rank]


def collect(mesh: Mesh, results_by_rank: Sequence[Any]) -> list[Any]:
    """One result per shard, from the rank that answers for it. Raises ValueError unless every rank has one result."""
    if len(results_by_rank) != mesh.world_size:
        raise ValueError(f"{len(results_by_rank)} results for a mesh of {mesh.world_size} ranks")
    return [results_by_rank[rank] for rank in mesh.output_ranks]
