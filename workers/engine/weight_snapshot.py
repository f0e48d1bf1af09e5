"""Copy of trained weights in host memory, with which forward passes run after the weights have changed.

A forward pass under older weights would need a second model on the device. Instead the tensors of device and host are exchanged
one by one, in place, and exchanged back after the pass: the host holds one copy, and the device one tensor more than before. An
optimizer that keeps its own float32 weights is not touched; it does not step meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from workers.engine.base import TrainEngine
from workers.host_buffers import host_buffers


class WeightSnapshot:
    """Snapshot of an engine's trained tensors; the host's memory is taken with the first ``take``."""

    def __init__(self, engine: TrainEngine) -> None:
        self._engine = engine
        self._host: list[Tensor] = []

    @torch.no_grad()
    def take(self) -> None:
        """Copy the tensors, which are on the device. The copy replaces an earlier one."""
        tensors = self._engine.trained_tensors()
        if not self._host:
            sizes, on_gpu = [tensor.numel() * tensor.element_size() for tensor in tensors], any(t.is_cuda for t in tensors)
            buffers = host_buffers(sizes, page_locked=on_gpu)
            self._host = [buffer.view(tensor.dtype).view(tensor.shape) for buffer, tensor in zip(buffers, tensors, strict=True)]
        for host, tensor in zip(self._host, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        _finish(tensors)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Run the block with the weights of the snapshot. The present ones are back afterwards, also if the block raises."""
        assert self._host, "no snapshot was taken"
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        tensors = self._engine.trained_tensors()
        for host, tensor in zip(self._host, tensors, strict=True):
            present = tensor.clone()
            tensor.copy_(host, non_blocking=True)
            # In the order of the stream: the host's content is read before it is replaced.
            host.copy_(present, non_blocking=True)
        _finish(tensors)


def _finish(tensors: Sequence[Tensor]) -> None:
    """Wait for the copies: the host's memory is read next by code that knows no stream."""
    if any(tensor.is_cuda for tensor in tensors):
        torch.cuda.synchronize()
