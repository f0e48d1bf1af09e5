"""Buffers in one mapping: aligned, apart from each other, and of the sizes that were asked for."""

import gc

import pytest
import torch

from workers.host_buffers import ALIGNED, host_buffers


def test_buffers_are_aligned_and_do_not_overlap() -> None:
    sizes = [1, 64, 65, 0, 4096, 3]
    buffers = host_buffers(sizes)
    assert [len(buffer) for buffer in buffers] == sizes
    assert all(buffer.data_ptr() % ALIGNED == 0 for buffer in buffers if len(buffer))
    for value, buffer in enumerate(buffers):
        buffer.fill_(value)
    assert all(torch.equal(buffer, torch.full_like(buffer, value)) for value, buffer in enumerate(buffers))
    assert host_buffers([]) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's driver locks the pages")
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_mapping_that_could_not_be_locked_is_released_without_an_error() -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        host_buffers([1], page_locked=True)
    gc.collect()
