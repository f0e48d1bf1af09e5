"""SGLang on CPU: arguments, environment, seeded sampling, and stand-ins for CUDA-only packages. Not used on CUDA.

SGLang imports sgl_kernel, torchvision and triton also on CPU, without calling anything in them. An import hook in SGLang's own
processes provides empty modules for those that are not installed; nothing on disk and nothing in the trainer changes.
"""

from __future__ import annotations

import enum
import importlib
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from workers.rollout.base import RolloutSpec
from workers.rollout.sampling import draw_truncated, uniforms

CUDA_ONLY = ("sgl_kernel", "torchvision", "triton")
"""Packages that SGLang imports on CPU too, but does not call there."""


def environment(tensor_parallel_size: int) -> dict[str, str]:
    """Environment variables of SGLang's processes.

    SGLANG_CPU_OMP_THREADS_BIND needs one set of cores per rank; without sgl_kernel SGLang does not use it.
    """
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(["0"] * tensor_parallel_size),
        "GLOO_SOCKET_IFNAME": "lo",
    }


def completed(arguments: dict[str, Any], spec: RolloutSpec, token_bytes: int, engines: int) -> dict[str, Any]:
    """Complete ServerArgs for CPU: backends that exist there, and a KV cache for all sequences within gpu_memory_utilization.

    token_bytes: bytes of a token's keys and values. engines: number of engines on this machine, which share its memory.
    """
    share = int(psutil.virtual_memory().total * spec.rollout.gpu_memory_utilization) // engines
    wanted = spec.rollout.max_num_seqs * spec.max_model_len
    plain = {
        "max_total_tokens": min(wanted, share // token_bytes),
        "attention_backend": "torch_native",
        "lora_backend": "torch_native",
    }
    # The right-most wins: engine_kwargs may override the defaults in ``plain``, but not the settings that CPU requires.
    return plain | arguments | {
        "device": "cpu",
        "base_gpu_id": 0,
        "sampling_backend": "pytorch",
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
    }  # fmt: skip


def install_stubs() -> None:
    """Make the missing packages of CUDA_ONLY importable in this process, with any name in them; they have no effect."""
    # Determined before the hook is installed, which would find all of them.
    missing = frozenset(name for name in CUDA_ONLY if find_spec(name) is None)
    sys.meta_path.append(_Finder(missing))
    if "torchvision" in missing:
        for name in ("torchvision.transforms", "torchvision.transforms.v2"):  # the only value that SGLang uses from there
            vars(importlib.import_module(name))["InterpolationMode"] = Interpolation


def sample_by_seeds() -> None:
    """Replace SGLang's sampling in this process, which ignores the requests' seeds on CPU, by that of the embedded engine.

    SGLang's own seeded sampling needs enable_deterministic_inference, whose kernels are for GPUs. Here a row's token depends on
    its seed and position only; there also on whether any other row of the batch has top_k or top_p.
    """
    from sglang.srt.layers.sampler import Sampler
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    make = SamplingBatchInfo.from_schedule_batch

    def with_seeds(batch: Any, vocab_size: int) -> Any:
        info = make(batch, vocab_size)
        # SGLang keeps this tensor in step with the batch. Its own requests, of the warm-up, have no seed.
        info.sampling_seed = torch.tensor([request.sampling_params.sampling_seed or 0 for request in batch.reqs])
        return info

    def sample(self: Any, probs: Tensor, info: Any, positions: Tensor, simple: bool) -> tuple[Tensor, None]:
        """positions: of each row's last token in its sequence; sampling_arguments chose the keys accordingly."""
        uniform = uniforms(info.sampling_seed.numpy().view(np.uint64), positions.numpy())
        return draw_truncated(probs, info.top_ks.numpy(), info.top_ps.double().numpy(), uniform)[:, 0].int(), None

    SamplingBatchInfo.from_schedule_batch = with_seeds
    Sampler._sample_from_probs = sample


class PageableMemory(TorchFunctionMode):
    """Ignore requests for pinned memory: SGLang's LoRA makes them on CPU too, where torch raises without an accelerator."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.pin_memory:
            return args[0]
        return func(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})


class Interpolation(enum.Enum):
    """Stand-in for torchvision's InterpolationMode."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class _Finder(MetaPathFinder, Loader):
    """Import hook that provides a StandIn for every module below ``roots``. Appended to sys.meta_path: real modules win."""

    def __init__(self, roots: frozenset[str]) -> None:
        self.roots = roots

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self.roots else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = __file__
        module.__version__ = "3.0.0"  # type: ignore[attr-defined]


class StandIn(ModuleType):
    """A module in which every name exists: a class if it is capitalised, otherwise another StandIn.

    Usable as a decorator, with or without arguments, which returns the function unchanged; subscripts, unions and iteration have
    no effect.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # special names keep their meaning: absent unless they were set
            raise AttributeError(name)
        value = type(name, (), {"__init__": _ignore}) if name[0].isupper() else StandIn(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]
        return lambda function: function

    def __getitem__(self, item: Any) -> StandIn:
        return self

    def __or__(self, other: Any) -> StandIn:
        return self

    __ror__ = __or__

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def _ignore(self: Any, *args: Any, **kwargs: Any) -> None:
    pass
