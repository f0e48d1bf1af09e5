"""What is packed arrives equal, in memory of its own, and tensors go as buffers."""

import functools

import numpy as np
import pytest
import torch

from workers.batch import Batch
from workers.controller.wire import pack, unpack

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
def test_a_tensor_arrives_as_it_was(tensor: torch.Tensor) -> None:
    (arrived,) = unpack(pack([tensor]))
    assert (arrived.dtype, arrived.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(bits(arrived), bits(tensor))


def test_tensors_and_arrays_are_not_in_the_pickle() -> None:
    tensor, array = torch.zeros(10_000, dtype=torch.bfloat16), np.zeros(5_000)
    message = pack({"tensor": tensor, "array": array})
    assert len(message.data) < 1_000
    assert [buffer.nbytes for buffer in message.buffers] == [20_000, 40_000]
    assert message.buffers[0].ctypes.data == tensor.data_ptr(), "packing copies nothing"


def test_a_view_leaves_the_rest_of_its_storage_behind() -> None:
    assert pack(torch.zeros(1_000_000)[10:20]).nbytes < 1_000


def test_what_arrives_is_the_receivers_own() -> None:
    sent = {"tensor": torch.zeros(4), "array": np.zeros(4), "list": [0]}
    message = pack(sent)
    first, second = unpack(message), unpack(message)
    first["tensor"] += 1
    first["array"] += 1
    first["list"].append(1)
    for other in (sent, second):
        assert other["tensor"].sum() == 0 and other["array"].sum() == 0 and other["list"] == [0]


def test_a_batch_arrives_whole() -> None:
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


def test_the_graph_stays_at_home() -> None:
    tensor = torch.ones(2, requires_grad=True) * 2
    arrived = unpack(pack(tensor))
    assert not arrived.requires_grad and arrived.tolist() == [2.0, 2.0]


def test_sparse_tensors_and_functions_travel_too() -> None:
    sparse, function = unpack(pack((torch.eye(3).to_sparse(), lambda x: f"{NOTE} {x}")))
    assert torch.equal(sparse.to_dense(), torch.eye(3))
    assert function(1) == "defined here 1"
    assert unpack(pack(functools.partial(max, 3)))(5) == 5
