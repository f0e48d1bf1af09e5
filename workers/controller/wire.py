"""Format of arguments and results between processes: a small pickle, and separately the bytes of tensors and arrays.

Tensors are sent as numpy buffers: torch's own pickling copies them through a slow path (8 x slower than numpy).
"""

from __future__ import annotations

import io
import pickle
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class PackedMessage:
    """A packed value.

    data: the pickle. buffers: uint8, one for each tensor or array in it, in order; views, not copies.
    """

    data: bytes
    buffers: tuple[np.ndarray, ...]

    @property
    def nbytes(self) -> int:
        return len(self.data) + sum(buffer.nbytes for buffer in self.buffers)


def pack(value: Any) -> PackedMessage:
    """Pack any value that cloudpickle takes.

    Tensors lose their graph and their device: they arrive on the CPU. A view is sent without the rest of its storage.
    """
    buffers: list[pickle.PickleBuffer] = []
    with io.BytesIO() as stream:
        _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
        data = stream.getvalue()
    return PackedMessage(data, tuple(np.asarray(buffer.raw()) for buffer in buffers))


def unpack(message: PackedMessage) -> Any:
    """The packed value in memory of its own: writable, and independent of the memory of the parcel.

    The copy costs 20-50 ms per 100 MB. Without it an in-place change would silently reach the data of other ranks in Ray's
    object store, and a batch that is kept would keep its part of the store allocated.
    """
    return pickle.loads(message.data, buffers=[buffer.copy() for buffer in message.buffers])


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")  # if it is not loaded there are no tensors, and importing it takes a second
        if torch is not None and type(value) is torch.Tensor and value.layout is torch.strided:
            return _reduce_tensor(value)
        return super().reducer_override(value)


def _reduce_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Reduce a tensor to a buffer of its bytes, its dtype and its shape."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return _build_tensor, (pickle.PickleBuffer(flat.numpy().data), tensor.dtype, tuple(tensor.shape))


def _build_tensor(buffer: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    import torch

    if not buffer.size:  # an empty buffer cannot be viewed as another dtype
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(buffer).view(dtype).reshape(shape)
