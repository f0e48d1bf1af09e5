"""Offload device tensors to the host and restore them as the same tensor objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from workers.engine.base import TrainEngine
from workers.host_buffers import host_buffers

Place = Literal["device", "cpu"]


class Offloadable:
    """A set of device tensors whose memory can be released and reacquired in place.

    Storages are resized to zero, not replaced, so that optimizers, FSDP and views that refer to the tensors stay valid. Tensors
    that share a storage are moved once. On a CPU device nothing is copied; only the place is recorded, so that the same
    assertions hold there.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        # Empty tensors, such as the shard of a rank without rows, all have the address 0.
        storages = [tensor.untyped_storage() for tensor in tensors if tensor.numel()]
        on_gpu = [storage for storage in storages if storage.device.type == "cuda"]
        self._storages = list({storage.data_ptr(): storage for storage in on_gpu}.values())
        self._host: list[Tensor] = []
        self.place: Place = "device"

    def move(self, place: Place) -> None:
        """Move all storages; a no-op if they are there. Returns when the copies are complete."""
        if place == self.place:
            return
        self.place = place
        if not self._storages:
            return
        if place == "cpu":
            # Once: locking the pages takes longer than any copy (0.04 s per GB, against 0.02).
            self._host = self._host or host_buffers([storage.nbytes() for storage in self._storages], page_locked=True)
            for host, storage in zip(self._host, self._storages, strict=True):
                host.copy_(_bytes(storage), non_blocking=True)
            torch.cuda.synchronize()
            # Only after the synchronize: the copies are asynchronous and read this memory.
            for storage in self._storages:
                storage.resize_(0)
        else:
            for host, storage in zip(self._host, self._storages, strict=True):
                storage.resize_(len(host))
                _bytes(storage).copy_(host, non_blocking=True)
            torch.cuda.synchronize()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class WeightSnapshot:
    """Copy of an engine's trained tensors on the host, for forward passes after the weights have changed.

    A pass under older weights would need a second model on the device. Instead the tensors of device and host are exchanged one
    by one, in place, and exchanged back after the pass: the host holds one copy, and the device one tensor more than before. An
    optimizer that keeps its own float32 weights is not touched; it does not step meanwhile. The host's memory is taken with the
    first ``take``.
    """

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
