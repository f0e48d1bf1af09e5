"""Differentiable collectives.

The backward of an all-gather depends on what the ranks do with the result. If each rank computes something different from it,
gradients must be summed over ranks. If all ranks compute the same, each already has the full gradient, and a sum would count it
once per rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gather(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather (n, ...) -> (ranks * n, ...), in rank order; the gradient is summed: each rank uses the result differently."""
    whole: Tensor = _Gather.apply(mine, group, True)
    return whole


def gather_replicated(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather whose result all ranks use identically: the gradient is each rank's own slice, without communication."""
    whole: Tensor = _Gather.apply(mine, group, False)
    return whole


def sum_replicated(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-reduce whose result all ranks use identically: the gradient is that of the sum, without communication."""
    whole: Tensor = _Sum.apply(part, group)
    return whole


def all_to_all(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange (ranks, ...), one part for each rank -> (ranks, ...), one part from each rank."""
    received: Tensor = _AllToAll.apply(parts, group)
    return received


class _Gather(torch.autograd.Function):
    """All-gather along the first dimension; the backward all-reduces the gradient if ``summed``, then takes the rank's slice."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, group: dist.ProcessGroup, summed: bool) -> Tensor:
        ctx.group, ctx.summed = group, summed
        whole = mine.new_empty(group.size() * len(mine), *mine.shape[1:])
        dist.all_gather_into_tensor(whole, mine.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        group = ctx.group
        # Autograd may pass an expanded gradient, such as that of a sum; collectives need contiguous memory.
        gradient = gradient.contiguous()
        if ctx.summed:
            dist.all_reduce(gradient, group=group)
        return gradient.chunk(group.size())[group.rank()], None, None


class _Sum(torch.autograd.Function):
    """All-reduce; each rank's part gets the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        whole = part.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _AllToAll(torch.autograd.Function):
    """All-to-all along the first dimension."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(parts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, parts.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return each part's gradient to the rank that sent it: the exchange is its own inverse."""
        return all_to_all(gradient, ctx.group), None
