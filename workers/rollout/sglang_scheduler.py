"""What runs in SGLang's own processes, one for each of its ranks."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

ERROR = "error"
"""Name of the tensor that takes the text of an error in read_weights, as bytes."""


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """SGLang's process of one rank; but only what a request says ends an answer, not the model's directory."""
    from sglang.srt.managers import scheduler

    class Scheduler(scheduler.Scheduler):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.model_config.hf_eos_token_id = set()
            gc.freeze()  # on CPU SGLang collects garbage in each flush: 0.3 s, of what lives as long as this process

    scheduler.Scheduler = Scheduler
    scheduler.run_scheduler_process(*args, **kwargs)


def read_weights(model: nn.Module, wanted: Sequence[tuple[str, Tensor]]) -> None:
    """SGLang calls this as if it loaded weights; it reads them, into the memory that came.

    wanted: ("name|size,size|start", tensor): the trainer's tensor ``name`` of these sizes, numbers from ``start`` of it
    flattened, as many as the tensor has. Those that this rank has are written, others left. A failure goes into the tensor ERROR.
    """
    try:
        for key, out in wanted:
            if key != ERROR:
                name, sizes, start = key.split("|")
                for place in places_of(model, name, tuple(map(int, sizes.split(",")))):
                    place.read(int(start), out)
    except Exception:
        room = dict(wanted)[ERROR]
        text = torch.frombuffer(bytearray(traceback.format_exc().encode()[-len(room) :]), dtype=torch.uint8)
        room[: len(text)] = text


@dataclass(frozen=True, slots=True)
class Place:
    """Some numbers of the trainer's tensor, and where the model has them. held: a view of the model's own memory.

    offset, strides: of the same numbers in the trainer's tensor, flattened.
    """

    held: Tensor
    offset: int
    strides: tuple[int, ...]

    def read(self, start: int, out: Tensor) -> None:
        """Write those of them that are in [start, start + len(out)) of the trainer's tensor to where they belong in ``out``."""
        copy_inside(self.held, self.offset - start, self.strides, out)


def copy_inside(held: Tensor, offset: int, strides: Sequence[int], out: Tensor) -> None:
    """held's number (i, j, ...) belongs at offset + i * strides[0] + j * strides[1] + ... of ``out`` (n,): if that is there.

    Rows that are inside as a whole are copied at once, others each by itself.
    """
    step, count, n = strides[0], len(held), len(out)
    extent = sum((size - 1) * stride for size, stride in zip(held.shape[1:], strides[1:], strict=True))
    first = max(0, -(offset // step))  # that begins inside; rows before it may end there
    stop = max(first, min(count, (n - 1 - extent - offset) // step + 1))  # rows from here on end outside
    if first < stop:
        there = out.as_strided(held[first:stop].shape, strides, out.storage_offset() + offset + first * step)
        there.copy_(held[first:stop])
    before = range(max(0, -((offset + extent) // step)), min(first, count))
    for row in (*before, *range(stop, min(count, -((offset - n) // step)))):
        copy_inside(held[row], offset + row * step, strides[1:], out)


@cache
def places_of(model: Any, name: str, shape: tuple[int, ...]) -> list[Place]:
    """SGLang's own loader shows them: it is given a tensor without numbers, and what it would copy where is written down."""
    given = torch.empty(shape, device="meta")
    with torch.no_grad(), Watch(given) as watch:
        model.load_weights([(name, given)])
    if not watch.places:
        raise ValueError(f"SGLang's loader copies nothing of {name}")
    return watch.places


class Watch(TorchDispatchMode):
    """Copies of ``given``, or of views of it, are noted and not made; nor is any other tensor changed that was there before."""

    def __init__(self, given: Tensor) -> None:
        super().__init__()
        self.given = given
        self.places: list[Place] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            held, source = args[0], args[1]
            if source.untyped_storage()._cdata != self.given.untyped_storage()._cdata:
                raise ValueError("SGLang's loader copies something else than a part of what it is given")
            held, source = torch.atleast_1d(held.detach()), torch.atleast_1d(source)
            self.places.append(Place(held, source.storage_offset(), source.stride()))
            return args[0]
        if func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):  # of padding
            return args[0]
        return func(*args, **(kwargs or {}))
