"""Memory runs out: a real allocator's error, in the middle of an update."""

from typing import Any

import torch
from torch import Tensor, nn

TOO_MUCH = 2**50  # bytes: no machine has a petabyte


class Greedy(torch.autograd.Function):
    """Asks for too much in the backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        torch.empty(TOO_MUCH, dtype=torch.uint8)
        return grad


def strike(module: nn.Module, call: int, where: str) -> Any:
    """A forward hook of the module that runs out of memory in its ``call``-th call, or in that call's backward. Once."""
    calls = 0

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls != call:
            return None
        if where == "forward":
            torch.empty(TOO_MUCH, dtype=torch.uint8)
        if isinstance(output, tuple):  # megatron: and a bias
            return Greedy.apply(output[0]), *output[1:]
        return Greedy.apply(output)

    return module.register_forward_hook(hook)
