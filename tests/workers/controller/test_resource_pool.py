import pytest

from workers.controller.resource_pool import ResourcePool


def test_ranks_are_counted_node_by_node() -> None:
    pool = ResourcePool((2, 1, 3), "cuda", "train")
    assert pool.world_size == 6
    assert [pool.place(rank) for rank in range(6)] == [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2)]


def test_part_of_a_reservation_starts_at_its_first_slot() -> None:
    part = ResourcePool((2, 2), "cuda", "critic", room=ResourcePool((4, 4, 4), "cuda", "workers"), first_node=1, first_slot=2)
    assert [part.place(rank) for rank in range(4)] == [(1, 2), (1, 3), (2, 2), (2, 3)]


def test_pool_is_cut_into_parts_of_consecutive_ranks() -> None:
    """A part may span nodes. Parts have names of their own, except the only one."""
    pool = ResourcePool((3, 3), "cuda", "rollout", room=ResourcePool((4, 4), "cuda", "workers"), first_slot=1)
    parts = pool.parts(2)
    assert [[part.place(rank) for rank in range(part.world_size)] for part in parts] == [
        [(0, 1), (0, 2)], [(0, 3), (1, 1)], [(1, 2), (1, 3)],
    ]  # fmt: skip
    assert [(part.name, part.n_parts) for part in parts] == [("rollout.0", 3), ("rollout.1", 3), ("rollout.2", 3)]
    assert pool.parts(6) == [pool] and pool.n_parts == 1


@pytest.mark.parametrize("n_per_node", [(), (2, 0)])
def test_node_without_slots_is_refused(n_per_node: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"pool 'train' takes \[.*\] slots"):
        ResourcePool(n_per_node, "cpu", "train")
