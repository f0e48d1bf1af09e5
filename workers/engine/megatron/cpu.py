"""Patches that make megatron-core run on a CPU build of torch with gloo. Loaded only without CUDA.

megatron-core creates tensors with device="cuda", queries CUDA's device and random state, and compiles with inductor. The patches
replace torch functions in this process, so they must come before the first import of megatron.core.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

from workers.controller.environment import set_environment

FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "empty_like", "zeros_like")


@functools.cache
def pretend_cuda() -> None:
    """Apply the patches, once per process, before megatron.core is imported."""
    import torch
    from torch.utils._device import _device_constructors

    assert not torch.cuda.is_available(), "on CUDA megatron runs as it is"
    _device_constructors()  # caches the originals, which `with torch.device("meta")` looks up by identity
    for name in FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))
    cpu: Any = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu
    torch.cuda.synchronize = lambda *args, **kwargs: None
    torch.cuda.empty_cache = lambda: None
    tensor, module = cast(Any, torch.Tensor), cast(Any, torch.nn.Module)
    tensor.cuda = module.cuda = lambda self, *args, **kwargs: self
    tensor.type = with_cuda_names(tensor.type)
    torch.cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cast(Any, torch.cuda).manual_seed = torch.manual_seed
    # Megatron compiles small functions, and a CPU machine need not have a compiler. The variable is set for the import only, so
    # that child processes, such as those of SGLang, do not inherit it.
    with set_environment({"TORCHDYNAMO_DISABLE": "1"}):
        from megatron.core import jit
        from megatron.core.tensor_parallel import random
    jit.disable_jit_fuser()  # for modules imported from here on

    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


def on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a tensor factory: requests for CUDA are served on the CPU, and nothing is pinned."""

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and not isinstance(device, int) and str(device).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return made


def with_cuda_names(type_of: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Tensor.type(): it returns and accepts names like torch.cuda.FloatTensor, which optimizers compare with."""

    def renamed(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], str):
            args = (args[0].replace("torch.cuda.", "torch."), *args[1:])
        found = type_of(self, *args, **kwargs)
        is_name = isinstance(found, str) and not found.startswith("torch.cuda")
        return found.replace("torch.", "torch.cuda.", 1) if is_name else found

    return renamed
