"""When memory runs out in an update: what it looks like, and what the controller is told."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

# What torch raises as a bare RuntimeError: its CPU allocator, and cuBLAS when it cannot have its workspace.
SAYINGS = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


class OutOfMemory(RuntimeError):
    """Memory ran out before the optimizer stepped. Other ranks may hang in a collective that this one left."""


class RepeatableOutOfMemory(OutOfMemory):
    """And nothing of the step is left: the engine can have it again, in smaller micro-batches."""


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return type(error) is RuntimeError and any(saying in str(error) for saying in SAYINGS)


@contextmanager
def told_without_memory(undo: Callable[[], None] | None) -> Iterator[None]:
    """If memory runs out within, that is told as OutOfMemory; as RepeatableOutOfMemory, after ``undo``, if there is one."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)  # they hold the graph
        said = str(error).splitlines()[0]
        if undo is None:
            raise OutOfMemory(said) from None
        undo()
        raise RepeatableOutOfMemory(said) from None
