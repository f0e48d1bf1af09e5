"""Code that runs in SGLang's rank processes: the scheduler with a thread that loads and reads weights.

Problem: SGLang's own update call goes through its scheduler loop and costs 3 to 4 ms more per bucket. Idea: a daemon thread in
each rank process serves ``Weights`` over a pipe, and hands buckets to the model's own loader. For verification it reads weights
back: where the loader puts each number of a tensor is found by running it on a meta tensor and recording its copies (``Watch``),
so that fused, sharded and padded layers need no table of rules here.
"""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Client
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from workers.rollout.sglang.sglang_calls import RANKS, answer_calls

Shape = tuple[int, ...]
# Only the first rank reports that it has an adapter; the others get it a moment later and are polled. Seconds between attempts.
ATTEMPTS, PAUSE = 6000, 0.005


def run_scheduler(server_args: Any, *args: Any, **kwargs: Any) -> None:
    """Entry point of a rank process: SGLang's scheduler, with three changes.

    Only a request's stop tokens end a response, not those of the model's directory. A thread gives the worker access to the
    model's weights. On CPU requests are sampled by their seeds.
    """
    from sglang.srt.managers import scheduler

    from workers.rollout.sglang.sglang_cpu import PageableMemory, sample_by_seeds

    class Scheduler(scheduler.Scheduler):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.model_config.hf_eos_token_id = set()
            # On CPU SGLang runs the garbage collector in each flush: 0.3 s over objects that live as long as this process.
            gc.freeze()
            runner = self.tp_worker.model_runner
            weights = Weights(runner.model, runner.lora_manager if self.enable_lora else None)
            # No race with the scheduler's loop: the worker recalls all requests before it loads weights.
            Thread(target=answer_calls, args=(Client(os.environ[RANKS]), weights), daemon=True).start()

    scheduler.Scheduler = Scheduler
    if server_args.device == "cpu":
        sample_by_seeds()
    with PageableMemory() if server_args.enable_lora and server_args.device == "cpu" else nullcontext():
        scheduler.run_scheduler_process(server_args, *args, **kwargs)


class Weights:
    """A rank's model, loaded from and read into the worker's shared memory. number, memory: a SharedBucket.handle."""

    def __init__(self, model: Any, adapters: Any = None) -> None:
        """adapters: SGLang's LoRAManager, None without LoRA."""
        self.model, self.adapters = model, adapters
        self._mapped: dict[int, Tensor] = {}
        self._adapter: HeldAdapter | None = None

    @torch.no_grad()
    def load(self, number: int, memory: Tensor, named: Sequence[tuple[str, Shape, int]]) -> None:
        """Load a bucket with SGLang's own loader, within an update. named: trainer's name, shape, and offset in the memory."""
        # A bucket on another rank's GPU is copied to this device as a whole first: SGLang's parameters are memory of
        # torch_memory_saver, which only kernels of their own device may write to (a copy from another device fails with «invalid
        # argument»).
        memory = self._opened(number, memory).to(next(self.model.parameters()).device)
        self.model.load_weights([(name, memory[start : start + math.prod(shape)].view(shape)) for name, shape, start in named])
        finish(memory)

    @torch.no_grad()
    def read(self, number: int, memory: Tensor, wanted: Sequence[tuple[str, Shape, int, int]], offset: int) -> None:
        """Write the requested numbers to the memory from ``offset`` on; NaN where this rank does not hold a number.

        wanted: (name, shape, start, stop): numbers [start, stop) of the trainer's flattened tensor.
        """
        memory = self._opened(number, memory)
        for name, shape, start, stop in wanted:
            out = memory[offset : offset + stop - start].fill_(torch.nan)
            if self._adapter is not None and name in self._adapter.places:
                self._adapter.read(name, start, out)
            else:
                self._read_base(name, shape, start, out)
            offset += stop - start
        finish(memory)

    def _read_base(self, name: str, shape: Shape, start: int, out: Tensor) -> None:
        """Write the numbers of a base weight that this rank holds, of [start, start + len(out)), to ``out``."""
        try:
            places = places_of(self.model, name, shape)
        except Exception as error:
            raise RuntimeError(f"{name} cannot be read; verify_weights=off leaves all weights unproven") from error
        for place in places:
            place.read(start, out)

    @torch.no_grad()
    def take_adapter(self, name: str, places: Mapping[str, AdapterPlace], attempts: int = ATTEMPTS) -> None:
        """Make the adapter active on this rank now. Raises SGLang's error if it does not fit.

        SGLang would do this with the next request, where an error ends the process. name: SGLang's id of the adapter, which
        exists once this rank's main thread has processed the load.
        """
        for _ in range(attempts):
            if name in self.adapters.lora_refs:
                break
            time.sleep(PAUSE)
        else:
            raise RuntimeError(f"SGLang has not brought the adapter {name} to this rank within {attempts * PAUSE:g} s")
        self.adapters.fetch_new_loras({name})
        self._adapter = HeldAdapter(self.adapters, name, places)
        if self.adapters.device.type == "cuda":
            torch.cuda.synchronize(self.adapters.device)

    def _opened(self, number: int, memory: Tensor) -> Tensor:
        """The memory of a handle. On CPU it stays mapped, and an empty tensor stands for it until another one replaces it.

        GPU memory is sent each time and not kept: the trainer reuses it after the sync.
        """
        if not memory.is_cuda:
            memory = self._mapped[number] = memory if len(memory) else self._mapped[number]
        return memory


def finish(memory: Tensor) -> None:
    """Wait for copies to or from ``memory``: the worker reuses it as soon as the call returns."""
    if memory.is_cuda:
        torch.cuda.synchronize(memory.device)


@dataclass(frozen=True, slots=True)
class AdapterPlace:
    """Location of an adapter tensor: side A or B of SGLang's ``layer``, the one at index ``part`` of a stack of ``shapes``."""

    layer: str
    side: str
    shapes: tuple[Shape, ...]
    part: int


class HeldAdapter:
    """Reads the adapter ``name`` from the buffers of SGLang's LoRAManager that its kernels use. places: {tensor: location}."""

    def __init__(self, manager: Any, name: str, places: Mapping[str, AdapterPlace]) -> None:
        self.manager, self.name, self.places = manager, name, places

    def read(self, name: str, start: int, out: Tensor) -> None:
        """Write the numbers that this rank holds, of [start, start + len(out)) of the trainer's tensor, to ``out``.

        SGLang's own slicing for this rank is applied to a tensor of indices (-1: another member of the stack). The result shows
        which number of the trainer's tensor each number in the buffer is.
        """
        place, pool = self.places[name], self.manager.memory_pool
        sources = [torch.full(shape, -1) for shape in place.shapes]
        sources[place.part] = torch.arange(sources[place.part].numel()).view(place.shapes[place.part])
        number = next(i for i, layers in enumerate(self.manager.lora_modules) if place.layer in layers)
        module, kind = self.manager.lora_modules[number][place.layer], place.layer.rpartition(".")[2]
        if place.side == "A":
            source = module.slice_lora_a_weights(torch.cat(sources))
            held = pool.A_buffer[kind][number][pool.get_buffer_id(self.name), : len(source)]
        else:
            source = module.slice_lora_b_weights(torch.cat(sources))
            held = pool.B_buffer[kind][number][pool.get_buffer_id(self.name), :, : source.shape[1]]
        wanted = (source >= start) & (source < start + len(out))
        out[(source[wanted] - start).to(out.device)] = held[wanted.to(held.device)].to(out.device)


@dataclass(frozen=True, slots=True)
class WeightPlace:
    """Numbers of the trainer's tensor and their location in the model.

    held: view of the model's memory. offset, strides: of the same numbers in the trainer's flattened tensor.
    """

    held: Tensor
    offset: int
    strides: tuple[int, ...]

    def read(self, start: int, out: Tensor) -> None:
        """Write those that are in [start, start + len(out)) of the trainer's flattened tensor to their positions in ``out``."""
        copy_inside(self.held, self.offset - start, self.strides, out)


def copy_inside(held: Tensor, offset: int, strides: Sequence[int], out: Tensor) -> None:
    """Copy held[i, j, ...] to out[offset + i * strides[0] + j * strides[1] + ...] wherever that index is inside ``out`` (n,).

    Rows that lie completely inside are copied at once; rows that cross a boundary are handled recursively.
    """
    step, count, n = strides[0], len(held), len(out)
    extent = sum((size - 1) * stride for size, stride in zip(held.shape[1:], strides[1:], strict=True))
    first = max(0, -(offset // step))  # first row that begins inside; rows before it may still end inside
    stop = max(first, min(count, (n - 1 - extent - offset) // step + 1))  # first row that ends outside
    if first < stop:
        there = out.as_strided(held[first:stop].shape, strides, out.storage_offset() + offset + first * step)
        there.copy_(held[first:stop])
    before = range(max(0, -((offset + extent) // step)), min(first, count))
    for row in (*before, *range(stop, min(count, -((offset - n) // step)))):
        copy_inside(held[row], offset + row * step, strides[1:], out)


@cache
def places_of(model: Any, name: str, shape: Shape) -> list[WeightPlace]:
    """Locations of a trainer's tensor in the model, found by running SGLang's own loader on a meta tensor.

    Cached per tensor. Raises ValueError if the loader copies nothing of it.
    """
    given = torch.empty(shape, device="meta")
    with torch.no_grad(), Watch(given) as watch:
        model.load_weights([(name, given)])
    if not watch.places:
        raise ValueError(f"SGLang's loader copies nothing of {name}")
    return watch.places


class Watch(TorchDispatchMode):
    """Dispatch mode that records copies from ``given``, or from views of it, instead of executing them.

    The model stays unchanged. Raises ValueError for a copy from any other tensor.
    """

    def __init__(self, given: Tensor) -> None:
        super().__init__()
        self.given = given
        self.places: list[WeightPlace] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            held, source = args[0], args[1]
            # Views share the storage of ``given``; offset and strides then say which numbers of it are copied.
            if source.untyped_storage()._cdata != self.given.untyped_storage()._cdata:
                raise ValueError("SGLang's loader copies something else than a part of what it is given")
            held, source = torch.atleast_1d(held.detach()), torch.atleast_1d(source)
            self.places.append(WeightPlace(held, source.storage_offset(), source.stride()))
            return args[0]
        if func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):  # the loader fills padding: skipped
            return args[0]
        return func(*args, **(kwargs or {}))
