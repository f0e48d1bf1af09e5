"""trainer.deterministic in a worker: select bitwise reproducible kernels where torch has them, record those that are not."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# cuBLAS is reproducible only with a fixed workspace: docs.nvidia.com/cuda/cublas, «Results reproducibility».
ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
# Selects vLLM kernels whose result for a row does not depend on the other rows of the batch.
VLLM_ENVIRONMENT = {"VLLM_BATCH_INVARIANT": "1"}
NONDETERMINISM_WARNING = re.compile(
    r"(?P<kernel>\w[\w ]*?) (does not have a deterministic implementation|defaults to a non-deterministic)"
)


@contextmanager
def deterministic_kernels() -> Iterator[set[str]]:
    """Enable deterministic kernels in this process; yields the set of kernels that ran and may be nondeterministic."""
    kernels: set[str] = set()
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    # torch reports a kernel without a deterministic implementation as a warning, not through an API: with warn_only the run
    # continues, and the kernel's name is parsed from the text. «always» is needed: by default Python shows a warning once per
    # location.
    with warnings.catch_warnings():
        show = warnings.showwarning

        def record(message: Warning | str, *where: Any, **more: Any) -> None:
            if warned := NONDETERMINISM_WARNING.search(str(message)):
                kernels.add(warned["kernel"])
            else:
                show(message, *where, **more)

        warnings.showwarning = record
        warnings.filterwarnings("always", message=f".*{NONDETERMINISM_WARNING.pattern}")
        torch.use_deterministic_algorithms(True, warn_only=True)
        cudnn.deterministic, cudnn.benchmark = True, False
        try:
            yield kernels
        finally:
            cudnn.deterministic, cudnn.benchmark = before
            torch.use_deterministic_algorithms(False)


def make_backward_deterministic(out: Tensor) -> None:
    """Make the backward of the operation that produced ``out`` deterministic, if determinism is requested.

    FlashAttention selects its deterministic backward only if torch would otherwise refuse to run it. With warn_only it warns and
    accumulates in arbitrary order. Strict mode is therefore enabled for the duration of this one node.
    """
    if torch.is_deterministic_algorithms_warn_only_enabled() and out.grad_fn is not None:
        out.grad_fn.register_prehook(lambda _grads: torch.use_deterministic_algorithms(True))
        out.grad_fn.register_hook(lambda _before, _after: torch.use_deterministic_algorithms(True, warn_only=True))


def leave_strict_mode() -> None:
    """After a backward that failed: within such a node the hook that ends strict mode has not run."""
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(True, warn_only=True)
