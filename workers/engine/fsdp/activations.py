"""Reduce activation memory of long rows: layer inputs offloaded to the host, MLPs computed in tiles of tokens.

docs/performance.md has the measured savings.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import save_on_cpu

from workers.engine.hf.hf_model import PackedModel

MLP_PARTS = {"gate_proj", "up_proj", "gate_up_proj", "down_proj", "act_fn", "activation_fn"}
Run = Callable[[Tensor], Tensor]


def keep_inputs_on_host(model: PackedModel) -> None:
    """Offload what a layer saves for its backward to pinned host memory.

    After ``recompute_layers`` that is the layer's input alone.
    """
    for layer in model.layers:
        layer.forward = partial(_saving_on_host, layer.forward)


def _saving_on_host(forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Run a layer's forward with saved tensors offloaded to the host; pinned if there is CUDA."""
    with save_on_cpu(pin_memory=torch.cuda.is_available()):
        return forward(*args, **named)


def tile_mlps(model: PackedModel, shards: int) -> None:
    """Run each layer's MLP on ``shards`` tiles of the tokens, one after the other, in the forward and in the backward.

    The intermediate activations of one tile exist at a time; the backward recomputes each tile. Raises ValueError for layers
    whose MLP is not known to process every token independently and identically.
    """
    for layer in model.layers:
        children = dict(layer.named_children())
        if "mlp" not in children or not {name for name, _ in children["mlp"].named_children()} <= MLP_PARTS:
            raise ValueError(f"model.tiled_mlp.enabled=true: {type(layer).__name__} has no MLP of gate, up and down alone")
        # The class is replaced, not the module: names of weights stay those of transformers.
        mlp = children["mlp"]
        mlp.__class__ = _tiled_class(type(mlp), shards)  # type: ignore[arg-type] # a class is hashable


@cache
def _tiled_class(mlp: type[nn.Module], shards: int) -> type[nn.Module]:
    """Subclass that runs in tiles; one for all layers, so that they share compiled graphs (see hf_model._fused_norm)."""

    class TiledMLP(mlp):  # type: ignore[misc, valid-type] # a variable base
        def forward(self, x: Tensor) -> Tensor:
            return _tiled(self, super().forward, shards, x)

    return TiledMLP


@torch.compiler.disable
def _tiled(mlp: nn.Module, run: Run, shards: int, x: Tensor) -> Tensor:
    """MLP in tiles: x (1, T, H) -> (1, T, H).

    The weights are looked up here, at each call: a sharding engine has just put the gathered ones into the module.
    """
    weights = [weight for weight in mlp.parameters() if weight.requires_grad]
    if not (torch.is_grad_enabled() and (x.requires_grad or weights)):
        return _in_tiles(run, shards, x)
    # The input is saved by an autograd node of its own, the last of the layer that saves anything. Recomputation of a
    # checkpointed layer ends there, before the MLP, which the backward of _Tiled recomputes anyway.
    kept: Tensor = _SaveInput.apply(x.new_empty(0).requires_grad_(), x)
    tiled: Tensor = _Tiled.apply(run, shards, kept.grad_fn, kept, x, *weights)
    return tiled


def _in_tiles(run: Run, shards: int, x: Tensor) -> Tensor:
    """Forward without gradient: tiles are written into one output, so there is no second copy of it to concatenate."""
    out = torch.empty_like(x)
    for out_tile, tile in zip(out.chunk(shards, 1), x.chunk(shards, 1), strict=True):
        out_tile.copy_(run(tile))
    return out


class _SaveInput(torch.autograd.Function):
    """Autograd node that saves ``x`` for _Tiled. Its output is empty; ``anchor`` requires grad so that the node exists."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, d_anchor: Tensor) -> tuple[None, None]:
        return None, None


class _Tiled(torch.autograd.Function):
    """MLP in tiles; the backward recomputes each tile and accumulates the weights' gradients over tiles."""

    @staticmethod
    def forward(ctx: Any, run: Run, shards: int, saved_input: Any, kept: Tensor, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.run, ctx.shards, ctx.saved_input, ctx.weights = run, shards, saved_input, weights
        return _in_tiles(run, shards, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_input.saved_tensors
        d_x = torch.empty_like(x)
        # Accumulate over tiles in float32 whatever the weights' dtype.
        sums = [torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32)) for weight in ctx.weights]
        tiles = (whole.chunk(ctx.shards, 1) for whole in (x, d_x, d_out))
        for tile, d_tile, d_out_tile in zip(*tiles, strict=True):
            tile = tile.detach().requires_grad_()
            with torch.enable_grad():
                out = ctx.run(tile)
            gradient, *of_weights = torch.autograd.grad(out, [tile, *ctx.weights], d_out_tile)
            d_tile.copy_(gradient)
            for total, part in zip(sums, of_weights, strict=True):
                total += part
            del out, gradient, of_weights  # free before the next tile allocates its own
        of_weights = [total.to(weight.dtype) for total, weight in zip(sums, ctx.weights, strict=True)]
        return None, None, None, None, d_x, *of_weights
