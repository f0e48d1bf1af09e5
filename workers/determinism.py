"""trainer.deterministic in a worker: kernels that give the same bits for the same input, where torch has them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# cuBLAS repeats itself only with a workspace of its own: docs.nvidia.com/cuda/cublas, «Results reproducibility».
ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
# vLLM's kernels whose result for a row does not depend on the rows beside it.
VLLM_ENVIRONMENT = {"VLLM_BATCH_INVARIANT": "1"}
TOLD_BY_TORCH = re.compile(
    r"(?P<kernel>\w[\w ]*?) (does not have a deterministic implementation|defaults to a non-deterministic)"
)


@contextmanager
def repeating_kernels() -> Iterator[set[str]]:
    """In this process. Gives the set in which kernels are named that have run and may not repeat themselves."""
    kernels: set[str] = set()
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    with warnings.catch_warnings():
        show = warnings.showwarning

        def note(message: Warning | str, *where: Any, **more: Any) -> None:
            if told := TOLD_BY_TORCH.search(str(message)):
                kernels.add(told["kernel"])
            else:
                show(message, *where, **more)

        warnings.showwarning = note
        warnings.filterwarnings("always", message=f".*{TOLD_BY_TORCH.pattern}")
        torch.use_deterministic_algorithms(True, warn_only=True)
        cudnn.deterministic, cudnn.benchmark = True, False
        try:
            yield kernels
        finally:
            cudnn.deterministic, cudnn.benchmark = before
            torch.use_deterministic_algorithms(False)


def repeat_backward(out: Tensor) -> None:
    """Make the backward of the operation that gave ``out`` repeat itself, if that is asked for: FlashAttention does only where
    torch would refuse to run it otherwise (it adds up in whatever order, and with warn_only it says so and goes on).
    """
    if torch.is_deterministic_algorithms_warn_only_enabled() and out.grad_fn is not None:
        out.grad_fn.register_prehook(lambda _grads: torch.use_deterministic_algorithms(True))
        out.grad_fn.register_hook(lambda _before, _after: torch.use_deterministic_algorithms(True, warn_only=True))
