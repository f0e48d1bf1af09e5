"""What runs in SGLang's own processes, one for each of its ranks."""

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
ATTEMPTS, PAUSE = 6000, 0.005  # the first rank alone says that it has an adapter; others are behind by a moment


def run_scheduler(server_args: Any, *args: Any, **kwargs: Any) -> None:
    """SGLang's process of one rank; but only what a request says ends an answer, not the model's directory. And the worker can
    reach the model's weights, by a thread that waits for it: a round of SGLang's own calls takes milliseconds."""
    from sglang.srt.managers import scheduler

    from workers.rollout.sglang.sglang_cpu import PageableMemory

    class Scheduler(scheduler.Scheduler):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.model_config.hf_eos_token_id = set()
            gc.freeze()  # on CPU SGLang collects garbage in each flush: 0.3 s, of what lives as long as this process
            runner = self.tp_worker.model_runner
            weights = Weights(runner.model, runner.lora_manager if self.enable_lora else None)
            Thread(target=answer_calls, args=(Client(os.environ[RANKS]), weights), daemon=True).start()

    scheduler.Scheduler = Scheduler
    with PageableMemory() if server_args.enable_lora and server_args.device == "cpu" else nullcontext():
        scheduler.run_scheduler_process(server_args, *args, **kwargs)


class Weights:
    """A rank's model, and the worker's memory that weights come and go in (SharedBucket.handle)."""

    def __init__(self, model: Any, adapters: Any = None) -> None:
        """adapters: SGLang's LoRAManager, if it has one."""
        self.model, self.adapters = model, adapters
        self._mapped: dict[int, Tensor] = {}
        self._adapter: HeldAdapter | None = None

    @torch.no_grad()
    def load(self, number: int, memory: Tensor, named: Sequence[tuple[str, Shape, int]]) -> None:
        """By SGLang's own loader, within an update. named: the trainer's name and shape, and where its numbers begin in there."""
        # Another rank's bucket is copied over whole: SGLang's parameters are memory of torch_memory_saver, which only kernels of
        # their own device may write to (a copy from another device fails with «invalid argument»).
        memory = self._opened(number, memory).to(next(self.model.parameters()).device)
        self.model.load_weights([(name, memory[start : start + math.prod(shape)].view(shape)) for name, shape, start in named])
        finish(memory)

    @torch.no_grad()
    def read(self, number: int, memory: Tensor, wanted: Sequence[tuple[str, Shape, int, int]], offset: int) -> None:
        """wanted: (name, shape, start, stop), numbers [start, stop) of the trainer's flattened tensor, one after the other from
        ``offset`` on in the memory. Those that this rank has not are NaN there."""
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
        try:
            places = places_of(self.model, name, shape)
        except Exception as error:
            raise RuntimeError(f"{name} cannot be read; verify_weights=off leaves all weights unproven") from error
        for place in places:
            place.read(start, out)

    @torch.no_grad()
    def take_adapter(self, name: str, places: Mapping[str, AdapterPlace], attempts: int = ATTEMPTS) -> None:
        """Now, and not with the next request, where what does not fit ends the process. Raises what SGLang does.

        name: what SGLang knows it by, once the main thread of this rank has come to it.
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
        """On CPU it stays mapped until another of this number comes. A GPU's comes each time: it is the trainer's afterwards."""
        if not memory.is_cuda:
            memory = self._mapped[number] = memory if len(memory) else self._mapped[number]
        return memory


def finish(memory: Tensor) -> None:
    """What is copied to or from it. It is the worker's again when the call has its answer."""
    if memory.is_cuda:
        torch.cuda.synchronize(memory.device)


@dataclass(frozen=True, slots=True)
class AdapterPlace:
    """Where a tensor of an adapter is: side A or B of SGLang's ``layer``, among others (shapes) on one another, its own the one
    at ``part``."""

    layer: str
    side: str
    shapes: tuple[Shape, ...]
    part: int


class HeldAdapter:
    """The adapter that SGLang's LoRAManager has under ``name``, as it computes with it."""

    def __init__(self, manager: Any, name: str, places: Mapping[str, AdapterPlace]) -> None:
        self.manager, self.name, self.places = manager, name, places

    def read(self, name: str, start: int, out: Tensor) -> None:
        """Write those numbers of the trainer's tensor that this rank has, of [start, start + len(out)), to ``out``.

        SGLang cuts for a rank what it is given whole: so it is given where each number comes from, -1 if from another tensor.
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
        out[(source[wanted] - start).to(out.device)] = held[wanted.to(held.device)]


@dataclass(frozen=True, slots=True)
class WeightPlace:
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
def places_of(model: Any, name: str, shape: Shape) -> list[WeightPlace]:
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
        self.places: list[WeightPlace] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            held, source = args[0], args[1]
            if source.untyped_storage()._cdata != self.given.untyped_storage()._cdata:
                raise ValueError("SGLang's loader copies something else than a part of what it is given")
            held, source = torch.atleast_1d(held.detach()), torch.atleast_1d(source)
            self.places.append(WeightPlace(held, source.storage_offset(), source.stride()))
            return args[0]
        if func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):  # of padding
            return args[0]
        return func(*args, **(kwargs or {}))
