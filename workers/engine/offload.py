"""Tensors that leave the device and come back as the very same objects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

Place = Literal["device", "cpu"]


class Offloadable:
    """A set of device tensors whose memory can be given back, and taken again, in place.

    The tensors' storages are emptied, not replaced, so that optimizers, FSDP and views that refer to them need not know. On a
    CPU device nothing is copied; only the place is recorded, so that the same asserts hold there.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        storages = [tensor.untyped_storage() for tensor in tensors if tensor.numel()]
        self._storages = {storage.data_ptr(): storage for storage in storages}
        self._host: dict[int, Tensor] = {}
        self.place: Place = "device"

    def move(self, place: Place) -> None:
        if place == self.place:
            return
        self.place = place
        on_gpu = [(key, storage) for key, storage in self._storages.items() if storage.device.type == "cuda"]
        if place == "cpu":
            for key, storage in on_gpu:
                self._host[key] = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
                self._host[key].copy_(_bytes(storage), non_blocking=True)
            if on_gpu:
                torch.cuda.synchronize()
            for _, storage in on_gpu:
                storage.resize_(0)
        else:
            for key, storage in on_gpu:
                storage.resize_(self._host[key].numel())
                _bytes(storage).copy_(self._host[key], non_blocking=True)
            if on_gpu:
                torch.cuda.synchronize()
            self._host.clear()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
