"""When memory runs out in an update: what it looks like, and what the controller is told."""

from __future__ import annotations

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
