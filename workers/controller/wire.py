"""How arguments and results travel: a small pickle, and beside it the bytes of every tensor and array.

torch's own pickling of tensors copies them through a slow path (8 x slower than numpy), so tensors leave as numpy buffers.
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
class Parcel:
    """data: the pickle. buffers: uint8, one for each tensor or array in it, in order; views, not copies."""

    data: bytes
    buffers: tuple[np.ndarray, ...]

    @property
    def nbytes(self) -> int:
        return len(self.data) + sum(buffer.nbytes for buffer in self.buffers)


def pack(value: Any) -> Parcel:
    """Anything cloudpickle takes. Tensors lose their graph and their device: they arrive on the CPU. Views travel alone,
    without the rest of their storage."""
    buffers: list[pickle.PickleBuffer] = []
    with io.BytesIO() as stream:
        _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
        data = stream.getvalue()
    return Parcel(data, tuple(np.asarray(buffer.raw()) for buffer in buffers))


def unpack(parcel: Parcel) -> Any:
    """The value, in memory of its own: writable, and independent of where the parcel lies.

    The copy costs 20-50 ms per 100 MB. Without it an in-place change would reach other ranks' data in Ray's store, without
    any error, and a batch that is kept would hold on to the store.
    """
    return pickle.loads(parcel.data, buffers=[buffer.copy() for buffer in parcel.buffers])


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")  # where it is not loaded there are no tensors, and loading it takes a second
        if torch is not None and type(value) is torch.Tensor and value.layout is torch.strided:
            return _reduce_tensor(value)
        return super().reducer_override(value)


def _reduce_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return _build_tensor, (pickle.PickleBuffer(flat.numpy().data), tensor.dtype, tuple(tensor.shape))


def _build_tensor(buffer: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    import torch

    if not buffer.size:  # no bytes can be seen as another type
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(buffer).view(dtype).reshape(shape)
