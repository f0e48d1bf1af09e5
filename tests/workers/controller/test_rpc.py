"""Remote calls: arguments reach their ranks, arrive equal in their own memory, and tensors are sent as buffers."""

import functools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.batch import Batch
from workers.controller.rpc import (
    Call,
    Executor,
    Failure,
    Mesh,
    Sharded,
    pack,
    role_call,
    sharded,
    split,
    unpack,
    worker_call,
)

NOTE = "defined here"
TENSORS = [
    torch.randn(3, 4),
    torch.randn(3, 4).to(torch.bfloat16),
    torch.randn(3).to(torch.float16),
    torch.randn(2, 2, dtype=torch.float64),
    torch.randn(5).to(torch.float8_e4m3fn),
    torch.arange(6),
    torch.tensor([True, False]),
    torch.randn(2, dtype=torch.complex64),
    torch.tensor(2.5),
    torch.empty(0, 3),
    torch.randn(4, 6).t(),
    torch.randn(10)[::3],
]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}")
def test_tensor_round_trips_bitwise(tensor: torch.Tensor) -> None:
    (arrived,) = unpack(pack([tensor]))
    assert (arrived.dtype, arrived.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(bits(arrived), bits(tensor))


def test_tensors_and_arrays_are_not_in_the_pickle() -> None:
    tensor, array = torch.zeros(10_000, dtype=torch.bfloat16), np.zeros(5_000)
    message = pack({"tensor": tensor, "array": array})
    assert len(message.data) < 1_000
    assert [buffer.nbytes for buffer in message.buffers] == [20_000, 40_000]
    assert message.buffers[0].ctypes.data == tensor.data_ptr(), "packing must not copy"


def test_view_is_sent_without_the_rest_of_its_storage() -> None:
    assert pack(torch.zeros(1_000_000)[10:20]).nbytes < 1_000


def test_received_arguments_are_independent_copies() -> None:
    sent = {"tensor": torch.zeros(4), "array": np.zeros(4), "list": [0]}
    message = pack(sent)
    first, second = unpack(message), unpack(message)
    first["tensor"] += 1
    first["array"] += 1
    first["list"].append(1)
    for other in (sent, second):
        assert other["tensor"].sum() == 0 and other["array"].sum() == 0 and other["list"] == [0]


def test_batch_round_trips() -> None:
    batch = Batch(
        lengths=torch.tensor([2, 3]),
        tokens={"input_ids": torch.arange(5), "log_probs": torch.randn(5).bfloat16()},
        rows={"uid": torch.tensor([7, 8])},
        meta={"temperature": 0.5},
    )
    arrived = unpack(pack(batch))
    assert isinstance(arrived, Batch) and arrived.meta == batch.meta
    for name in ("input_ids", "log_probs"):
        assert torch.equal(arrived.tokens[name], batch.tokens[name])
    assert torch.equal(arrived.rows["uid"], batch.rows["uid"])


def test_autograd_graph_is_not_sent() -> None:
    tensor = torch.ones(2, requires_grad=True) * 2
    arrived = unpack(pack(tensor))
    assert not arrived.requires_grad and arrived.tolist() == [2.0, 2.0]


def test_sparse_tensors_and_functions_round_trip() -> None:
    sparse, function = unpack(pack((torch.eye(3).to_sparse(), lambda x: f"{NOTE} {x}")))
    assert torch.equal(sparse.to_dense(), torch.eye(3))
    assert function(1) == "defined here 1"
    assert unpack(pack(functools.partial(max, 3)))(5) == 5


PAIRS = Mesh(shard_of_rank=(0, 0, 1, 1), output_ranks=(0, 3))


def test_ranks_of_a_replica_get_the_same_shard() -> None:
    everyone = object()
    calls = split(PAIRS, ("x", Sharded(["left", "right"])), {"plan": Sharded([1, 2]), "all": everyone})
    assert [args for args, _ in calls] == [("x", "left"), ("x", "left"), ("x", "right"), ("x", "right")]
    assert [kwargs["plan"] for _, kwargs in calls] == [1, 1, 2, 2]
    assert all(kwargs["all"] is everyone for _, kwargs in calls)


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    n_shards = draw(st.integers(1, 6))
    extra = draw(st.lists(st.integers(0, n_shards - 1), max_size=10))
    shard_of_rank = tuple(draw(st.permutations([*range(n_shards), *extra])))
    holders = [[rank for rank, shard in enumerate(shard_of_rank) if shard == s] for s in range(n_shards)]
    return Mesh(shard_of_rank, tuple(draw(st.sampled_from(ranks)) for ranks in holders))


@given(meshes())
def test_split_arguments_are_joined_in_order(mesh: Mesh) -> None:
    items = [f"item {shard}" for shard in range(mesh.n_shards)]
    calls = split(mesh, (Sharded(items),), {})
    assert len(calls) == mesh.world_size
    assert [calls[rank][0][0] for rank in mesh.output_ranks] == items


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((0, Sharded([1])), {}, "argument 1 has 1 items, the mesh 2 shards over 4 ranks"),
        ((), {"batch": Sharded([1, 2, 3])}, "argument 'batch' has 3 items, the mesh 2 shards over 4 ranks"),
    ],
)
def test_wrong_number_of_items_is_an_error_with_the_counts(
    args: tuple[object, ...], kwargs: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        split(PAIRS, args, kwargs)


@pytest.mark.parametrize(
    ("shard_of_rank", "answers", "message"),
    [
        ((0, 2), (0, 1), r"2 answering ranks, its ranks get shards \[0, 2\]"),
        ((0, 0, 1), (0,), r"1 answering ranks, its ranks get shards \[0, 1\]"),
        ((0, 0, 1, 1), (2, 3), r"rank 2 cannot answer for shard 0: ranks \[0, 1\] hold it"),
        ((0, 1), (0, 2), r"rank 2 cannot answer for shard 1: ranks \[1\] hold it"),
    ],
)
def test_invalid_mesh_is_refused(shard_of_rank: tuple[int, ...], answers: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mesh(shard_of_rank, answers)


class Role:
    def add(self, one: int, other: int = 0) -> int:
        return one + other


class Holder:
    def __init__(self, info: object) -> None:
        self.info = info
        self.roles = {"adder": Role()}

    def info_twice(self) -> list[object]:
        return [self.info] * 2


def executed(executor: Executor, call: Call[object], wanted: bool = True) -> object:
    result = executor.call(call.role, call.method, wanted, pack((call.args, dict(call.kwargs))))
    return result if isinstance(result, Failure) else unpack(result)


def test_call_reaches_the_worker_or_a_role_by_method_name() -> None:
    executor = Executor()
    executor.start("info", pack(Holder), pack(((), {})))
    assert executed(executor, worker_call(Holder.info_twice)) == ["info", "info"]
    assert executed(executor, role_call("adder", Role.add, 2, other=3)) == 5
    assert executed(executor, role_call("adder", Role.add, 2), wanted=False) is None
    failure = executed(executor, role_call("critic", Role.add, 2))
    assert isinstance(failure, Failure) and (failure.method, failure.message) == ("add", "KeyError: 'critic'")


def test_only_sharded_arguments_are_split() -> None:
    call = role_call("adder", Role.add, sharded([1, 2]), other=3)
    assert split(PAIRS, call.args, call.kwargs) == [((shard,), {"other": 3}) for shard in (1, 1, 2, 2)]
