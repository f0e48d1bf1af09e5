"""split and collect, against what they should be for meshes of every shape."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.controller.dispatch import Mesh, Sharded, collect, split

PAIRS = Mesh(shard_of_rank=(0, 0, 1, 1), output_ranks=(0, 3))


def test_ranks_of_a_replica_get_the_same_shard() -> None:
    everyone = object()
    calls = split(PAIRS, ("x", Sharded(["left", "right"])), {"plan": Sharded([1, 2]), "all": everyone})
    assert [args for args, _ in calls] == [("x", "left"), ("x", "left"), ("x", "right"), ("x", "right")]
    assert [kwargs["plan"] for _, kwargs in calls] == [1, 1, 2, 2]
    assert all(kwargs["all"] is everyone for _, kwargs in calls)


def test_one_rank_answers_for_a_shard() -> None:
    assert collect(PAIRS, ["a", None, None, "d"]) == ["a", "d"]


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    n_shards = draw(st.integers(1, 6))
    extra = draw(st.lists(st.integers(0, n_shards - 1), max_size=10))
    shard_of_rank = tuple(draw(st.permutations([*range(n_shards), *extra])))
    holders = [[rank for rank, shard in enumerate(shard_of_rank) if shard == s] for s in range(n_shards)]
    return Mesh(shard_of_rank, tuple(draw(st.sampled_from(ranks)) for ranks in holders))


@given(meshes())
def test_what_is_split_comes_back_in_order(mesh: Mesh) -> None:
    items = [f"item {shard}" for shard in range(mesh.n_shards)]
    calls = split(mesh, (Sharded(items),), {})
    assert len(calls) == mesh.world_size
    assert collect(mesh, [args[0] for args, _ in calls]) == items


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((0, Sharded([1])), {}, "argument 1 has 1 items, the mesh 2 shards over 4 ranks"),
        ((), {"batch": Sharded([1, 2, 3])}, "argument 'batch' has 3 items, the mesh 2 shards over 4 ranks"),
    ],
)
def test_a_wrong_number_of_items_is_counted(args: tuple[object, ...], kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split(PAIRS, args, kwargs)


def test_a_wrong_number_of_results_is_counted() -> None:
    with pytest.raises(ValueError, match="3 results for a mesh of 4 ranks"):
        collect(PAIRS, [1, 2, 3])


@pytest.mark.parametrize(
    ("shard_of_rank", "answers", "message"),
    [
        ((0, 2), (0, 1), r"2 answering ranks, its ranks get shards \[0, 2\]"),
        ((0, 0, 1), (0,), r"1 answering ranks, its ranks get shards \[0, 1\]"),
        ((0, 0, 1, 1), (2, 3), r"rank 2 cannot answer for shard 0: ranks \[0, 1\] hold it"),
        ((0, 1), (0, 2), r"rank 2 cannot answer for shard 1: ranks \[1\] hold it"),
    ],
)
def test_a_mesh_that_cannot_be(shard_of_rank: tuple[int, ...], answers: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mesh(shard_of_rank, answers)
