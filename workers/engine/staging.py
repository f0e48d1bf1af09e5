"""Staging of checkpoints in host memory, so that threads can write them while training continues.

Pinned memory for a whole checkpoint (12 bytes per parameter in float32) would take seconds per GB at the first save, and torch's
allocator never returns pinned blocks, which it rounds up to powers of two. The copies are therefore in ordinary memory: one
mapping of huge pages that the system reclaims when the last copy is released. Device tensors are copied through small pinned
buffers, one for each of several threads: while one thread waits for the device, others empty their buffers and touch the pages of
the mapping.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from workers.host_buffers import host_buffers, thread_count
from workers.host_memory import GB, Memory, host_memory

PIECE = 2**26  # bytes copied at a time: the size of a thread's pinned buffer
SPARE = 0.1
"""Fraction of the host's memory that must stay available in addition to the copies.

It is more than the limits at which trainer.watch warns and stops.
"""


def shortage(size: int) -> str | None:
    """Explain why the copies of all ranks do not fit into the memory of their hosts; None if they fit.

    size: bytes of this rank's copies. Collective. The answer is the same on every rank, so that all of them save in the same way.
    """
    memory = host_memory()
    mine = socket.gethostname(), size, usable_memory(memory), memory.whose
    ranks = [mine] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    for host in dict.fromkeys(name for name, *_ in ranks):
        # Ranks of one host share its memory: their copies add up, and the tightest limit seen by any of them applies.
        wanted = sum(size for name, size, *_ in ranks if name == host)
        usable, whose = min((usable, whose) for name, _, usable, whose in ranks if name == host)
        if wanted > usable:
            room = f"the {whose}'s memory has room for {max(usable, 0.0) / GB:.3g} GB, in addition to {SPARE:.0%} that stay free"
            return f"copies of {wanted / GB:.3g} GB on {host}: {room}"
    return None


def usable_memory(memory: Memory) -> float:
    """Bytes that copies may take."""
    return memory.available - SPARE * memory.total


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy all tensors into one host mapping; complete when this returns. Names, dtypes and shapes stay the same."""
    sources = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors.values()]
    targets = host_buffers([len(source) for source in sources])
    pieces: list[tuple[Tensor, Tensor]] = []
    for target, source in zip(targets, sources, strict=True):
        pieces += zip(target.split(PIECE), source.split(PIECE), strict=True)
    device = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)
    if device is not None:
        torch.cuda.synchronize()  # the threads' streams do not wait for the stream that computed the tensors
    waiting = iter(pieces)
    with ThreadPoolExecutor(threads := thread_count()) as pool:
        for done in [pool.submit(_copy, waiting, device) for _ in range(threads)]:
            done.result()
    named = zip(tensors.items(), targets, strict=True)
    return {name: target.view(tensor.dtype).view(tensor.shape) for (name, tensor), target in named}


def _copy(pieces: Iterator[tuple[Tensor, Tensor]], device: torch.device | None) -> None:
    """Copy pieces until none are left; all threads take them from one iterator.

    numpy copies in the calling thread; torch would use more threads of its own.
    """
    if device is None:
        for target, source in pieces:
            np.copyto(target.numpy(), source.numpy())
        return
    with torch.cuda.device(device), torch.cuda.stream(stream := torch.cuda.Stream(device)):  # a new thread starts on device 0
        buffer = torch.empty(PIECE, dtype=torch.uint8, pin_memory=True)
        for target, source in pieces:
            here = buffer[: len(source)].copy_(source, non_blocking=True)
            # The copy to the pinned buffer is asynchronous, and the next piece overwrites that buffer.
            stream.synchronize()
            np.copyto(target.numpy(), here.numpy())
