"""Copies of a rank's tensors in host memory, so that a thread can write them while training goes on.

Pinning as much memory as a checkpoint takes (12 bytes a parameter in float32) would take seconds a GB at the first save, and
torch's allocator keeps pinned blocks, rounded up to powers of two, for good. So the copies lie in ordinary memory, one mapping of
huge pages that the system gets back when the last of them is dropped. Tensors of a device come through small pinned buffers, one
for each of several threads: while one thread waits for the device, others empty their buffers and touch the mapping's pages.
"""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from workers.host_memory import GB, Memory, host_memory

THREADS = 8
PIECE = 2**26  # bytes that are copied at a time: a thread's pinned buffer
ALIGNED = 64  # bytes: where a tensor begins
SPARE = 0.1
"""The share of the host's memory that must stay available beside the copies: more than trainer.watch warns and stops at."""


def shortage(size: int) -> str | None:
    """Why the copies of all ranks do not fit into their hosts' memory, the same on every rank; None if they do.

    size: bytes of this rank's copies. Collective.
    """
    memory = host_memory()
    mine = socket.gethostname(), size, usable_memory(memory), memory.whose
    ranks = [mine] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    for host in dict.fromkeys(name for name, *_ in ranks):
        wanted = sum(size for name, size, *_ in ranks if name == host)
        usable, whose = min((usable, whose) for name, _, usable, whose in ranks if name == host)
        if wanted > usable:
            room = f"the {whose}'s memory has room for {max(usable, 0.0) / GB:.3g} GB, beside {SPARE:.0%} that stay free"
            return f"copies of {wanted / GB:.3g} GB on {host}: {room}"
    return None


def usable_memory(memory: Memory) -> float:
    """Bytes of it that copies may take."""
    return memory.available - SPARE * memory.total


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same bytes in memory of their own, on the host; complete when this returns."""
    starts, end = {}, 0
    for name, tensor in tensors.items():
        starts[name] = end
        end += -(-tensor.nbytes // ALIGNED) * ALIGNED
    memory = mmap.mmap(-1, max(end, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole, copies = torch.frombuffer(memory, dtype=torch.uint8), {}
    pieces: list[tuple[Tensor, Tensor]] = []
    for name, tensor in tensors.items():
        source = tensor.detach().contiguous().view(-1).view(torch.uint8)
        copy = whole[starts[name] : starts[name] + len(source)]
        copies[name] = copy.view(tensor.dtype).view(tensor.shape)
        pieces += zip(copy.split(PIECE), source.split(PIECE), strict=True)
    device = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)
    if device is not None:
        torch.cuda.synchronize()  # the threads' streams wait for nobody
    threads, waiting = min(THREADS, os.cpu_count() or 1), iter(pieces)
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(_copy, waiting, device) for _ in range(threads)]:
            done.result()
    return copies


def _copy(pieces: Iterator[tuple[Tensor, Tensor]], device: torch.device | None) -> None:
    """Copy what the other threads leave. numpy, unlike torch, takes no threads of its own for it."""
    if device is None:
        for target, source in pieces:
            np.copyto(target.numpy(), source.numpy())
        return
    with torch.cuda.device(device), torch.cuda.stream(stream := torch.cuda.Stream(device)):  # a new thread is on device 0
        buffer = torch.empty(PIECE, dtype=torch.uint8, pin_memory=True)
        for target, source in pieces:
            here = buffer[: len(source)].copy_(source, non_blocking=True)
            stream.synchronize()
            np.copyto(target.numpy(), here.numpy())
