"""Tensors of a GPU leave for page-locked host memory and come back with the same bits. Needs a GPU."""

import gc

import pytest
import torch

from workers.engine.offload import Offloadable
from workers.host_buffers import host_buffers

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
MB = 2**20


def test_tensors_leave_and_come_back_with_the_same_bits() -> None:
    """Two of them share a storage, one is empty; what was changed on the device in between is what leaves the next time."""
    torch.cuda.init()
    whole = torch.randn(64 * MB // 4, device="cuda")
    tensors = [whole[:1000], whole[1000:], torch.randn(1001, 999, device="cuda"), torch.empty(0, device="cuda")]
    before = torch.cuda.memory_allocated()
    places = Offloadable(tensors)
    for turn in range(3):
        tensors[2].add_(turn)
        expected = [tensor.cpu() for tensor in tensors]
        places.move("cpu")
        assert torch.cuda.memory_allocated() <= before - 64 * MB
        filler = torch.full((64 * MB,), 7, dtype=torch.uint8, device="cuda")  # takes the memory that was released
        places.move("device")
        assert all(torch.equal(tensor.cpu(), value) for tensor, value in zip(tensors, expected, strict=True))
        assert whole.data_ptr() == tensors[0].data_ptr() != 0
        del filler
    assert torch.cuda.memory_allocated() == before


def test_buffers_are_page_locked_until_they_are_released() -> None:
    """After the release, the same addresses can be locked again: the driver has no lock left from before."""
    for _ in range(3):
        buffers = host_buffers([MB, 10 * MB + 1], page_locked=True)
        assert all(buffer.is_pinned() for buffer in buffers)
        del buffers
        gc.collect()
