"""Out-of-memory errors in an update: detection, and the exceptions that report them to the controller."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from workers.determinism import leave_strict_mode

# Messages that torch raises as a plain RuntimeError: its CPU allocator, and cuBLAS without memory for its workspace.
MESSAGES = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


class OutOfMemory(RuntimeError):
    """Memory ran out before the optimizer stepped. Other ranks may hang in a collective that this one has left."""


class RepeatableOutOfMemory(OutOfMemory):
    """Memory ran out, and the step was undone completely: it can be retried with smaller micro-batches."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception of torch or Python means that memory ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return type(error) is RuntimeError and any(text in str(error) for text in MESSAGES)


@contextmanager
def convert_out_of_memory(undo: Callable[[], None] | None) -> Iterator[None]:
    """Convert an out-of-memory error in the block to OutOfMemory, or to RepeatableOutOfMemory after ``undo()``.

    undo: restores the engine's state from before the step; None if that is impossible. Other errors pass unchanged.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        leave_strict_mode()
        traceback.clear_frames(error.__traceback__)  # the frames keep the autograd graph alive
        message = str(error).splitlines()[0]
        if undo is None:
            raise OutOfMemory(message) from None
        undo()
        raise RepeatableOutOfMemory(message) from None
