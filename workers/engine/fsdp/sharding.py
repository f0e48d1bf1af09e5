"""Shard a model over ranks with ``fully_shard``, fill the shards with weights, and convert between shards and full tensors."""

from __future__ import annotations

import math
import os
import shutil
import sysconfig
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from configs.schema.common import FSDPConfig
from workers.compilation import compiled
from workers.controller.logs import announce
from workers.engine.fsdp.units import layers_per_unit
from workers.engine.hf.hf_model import DTYPES, PackedModel
from workers.engine.stored_weights import StoredWeights


def device_mesh(device: str, fsdp_size: int) -> DeviceMesh:
    """Mesh of the ranks. Dimension ``shard``: the ranks that hold one copy of the model together.

    fsdp_size: ranks per copy, consecutive; -1: all. With several copies (HSDP, hybrid sharding) the first dimension is
    ``replicate``: the ranks that hold the same part of different copies. Collective.
    """
    world = dist.get_world_size()
    if fsdp_size in (-1, world):
        return init_device_mesh(device, (world,), mesh_dim_names=("shard",))
    assert world % fsdp_size == 0, f"{world} ranks do not fall into copies over {fsdp_size}"
    return init_device_mesh(device, (world // fsdp_size, fsdp_size), mesh_dim_names=("replicate", "shard"))


def compiles(fsdp: FSDPConfig, device: str) -> bool:
    """Whether layers and language head are compiled: use_torch_compile, or on CUDA where it is None.

    Triton builds its launchers as C extensions of Python: where it cannot, None means False, and the rank's log has the
    reason.
    """
    if fsdp.use_torch_compile is not None:
        return fsdp.use_torch_compile
    if device != "cuda":
        return False
    # As Triton searches: CC alone if it is set, then gcc or clang, never cc; and Python's headers where sysconfig has them.
    headers = Path(sysconfig.get_path("include", "posix_prefix"))
    if not any(map(shutil.which, [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"])):
        missing = f"no C compiler CC={os.environ['CC']}" if "CC" in os.environ else "no C compiler; install gcc"
    elif not (headers / "Python.h").is_file():
        missing = f"no Python.h in {headers}; install Python's headers (python3-dev)"
    else:
        return True
    announce([f"layers are not compiled: {missing}, or set use_torch_compile=false"])
    return False


def compile_layers(model: PackedModel) -> None:
    """Compile the decoder layers, and what follows the products of the language head. Call before ``recompute_layers``.

    A layer's forward is compiled, not the module: hooks, of FSDP and of recomputation, stay outside of the graphs. All layers of
    a kind share their graphs, for any number of tokens.
    """
    # The roles of a worker may have layers of one class. Each role needs a graph for every kind of layer, with and without
    # gradient. Beyond torch's limit of 8 graphs, layers would run uncompiled.
    torch._dynamo.config.recompile_limit = 64
    model.fused = True
    for layer in model.layers:
        layer.forward = compiled(layer.forward)


def recompute_layers(model: PackedModel) -> None:
    """Save only the input of each decoder layer and recompute it in the backward. Call before ``shard``: hooks stay outside."""
    for layer in model.layers:
        # The model is in eval mode, so there is no dropout and no random state to keep.
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def shard(model: PackedModel, mesh: DeviceMesh, fsdp: FSDPConfig) -> None:
    """Apply fully_shard: decoder layers in units; embedding, final norm and language head as the root.

    A single rank that computes in the parameters' own dtype has nothing to gather or cast and is not wrapped: copying parameters
    and gradients cost 6 % of a step at 3.4M parameters and 2k tokens on a CPU, 9 % at 7B in bfloat16 on an H200, and a second
    copy of both.
    """
    dtype = DTYPES[fsdp.dtype]
    if mesh.size() == 1 and dtype == DTYPES[fsdp.model_dtype]:
        return
    # Gradients of ranks are summed in float32 at least, also where layers compute in bfloat16.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.promote_types(dtype, torch.float32))
    layers = model.layers
    # Layers may differ: a mixture of experts may begin with dense ones, which are smaller.
    size = layers_per_unit(max((sum(param.numel() for param in layer.parameters()) for layer in layers), default=1))
    for start in range(0, len(layers), size):
        fully_shard(layers[start : start + size], mesh=mesh, mp_policy=policy, reshard_after_forward=fsdp.reshard_after_forward)
    if model.head != "lm":
        fully_shard(model.value_head, mesh=mesh, reshard_after_forward=False)  # no policy: computed in the parameters' dtype
    # The root's parameters are needed again as soon as the backward begins.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Sum, never average: loss weights are computed over the global batch.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


@torch.no_grad()
def fill(model: PackedModel, weights: StoredWeights, given: Mapping[str, Tensor]) -> None:
    """Load this rank's shard of every weight from files.

    given: full tensors of what no file has (non-persistent buffers, the weights of a new adapter), by the model's names.
    """
    targets: dict[str, tuple[Tensor, int]] = {}
    for name, tensor in {**dict(model.hf.named_parameters()), **dict(model.hf.named_buffers())}.items():
        here = local(tensor)
        # Shards are rows: index of the first element = first row * elements per row.
        start = sum(offsets(tensor)[:1]) * math.prod(tensor.shape[1:])
        if name in given:
            here.view(-1).copy_(given[name].flatten()[start : start + here.numel()])
        else:
            # peft wraps an adapted layer and thereby renames its weight; files have the name without adapter.
            targets[name.replace(".base_layer.", ".")] = (here, start)
    weights.fill(targets)


@torch.no_grad()  # with autograd, extracting a shard from a DTensor is ten times slower
def local(tensor: Tensor) -> Tensor:
    """This rank's shard, detached, sharing memory; a plain tensor is its own shard."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def one_copy(tensor: DTensor) -> DeviceMesh:
    """Mesh of the ranks that hold the tensor together with this rank: one copy of the model."""
    *replicated, cut = tensor.placements
    assert cut == Shard(0) and all(placement == Replicate() for placement in replicated), "fully_shard cuts rows"
    return tensor.device_mesh["shard"]


def copies(mesh: DeviceMesh) -> tuple[int, int]:
    """Return (index of the copy that this rank belongs to, number of copies)."""
    names = mesh.mesh_dim_names or ()
    return (mesh.get_local_rank("replicate"), mesh["replicate"].size()) if "replicate" in names else (0, 1)


def offsets(tensor: Tensor) -> list[int]:
    """Start of this rank's shard in the full tensor, by dimension."""
    begin = [0] * tensor.dim()
    if isinstance(tensor, DTensor):
        mesh = one_copy(tensor)
        # fully_shard gives each rank this number of rows, so that the last ranks may have fewer, or none.
        rows = -(-len(tensor) // mesh.size())
        begin[0] = min(rows * mesh.get_local_rank(), len(tensor))
    return begin


def parts(state: Mapping[str, Tensor], rank: int, copy: tuple[int, int]) -> dict[str, tuple[Tensor, list[int]]]:
    """Shards that this rank writes, with their offsets.

    copy: see ``copies``; copies write tensors in turn. Tensors that are not sharded are written by rank 0.
    """
    own, n_copies = copy
    return {
        name: (local(tensor), offsets(tensor))
        for i, (name, tensor) in enumerate(state.items())
        if (i % n_copies == own if isinstance(tensor, DTensor) else rank == 0)
    }


def like(param: Tensor, shard: Tensor) -> Tensor:
    """Wrap a local shard as a DTensor sharded as ``param`` is."""
    if not isinstance(param, DTensor):
        return shard
    return DTensor.from_local(shard, param.device_mesh, param.placements, shape=param.shape, stride=param.stride())


def full(weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Gather the full tensor on every rank, cast to ``dtype`` before communication if that is narrower. Collective.

    One gather at a time: several concurrent ones were 1.1 to 1.2 times as fast on two gloo ranks but occasionally corrupted the
    heap there (torch 2.13).
    """
    shard = local(weight)
    if not isinstance(weight, DTensor):
        return shard
    mesh = one_copy(weight)
    if mesh.size() == 1:
        return shard
    if dtype is not None and dtype.itemsize < shard.itemsize:
        shard = shard.to(dtype)
    rows = -(-len(weight) // mesh.size())
    if len(shard) < rows:  # all-gather requires equal sizes; the padding rows are removed below
        shard = torch.cat([shard, shard.new_zeros(rows - len(shard), *shard.shape[1:])])
    whole = shard.new_empty(rows * mesh.size(), *shard.shape[1:])
    dist.all_gather_into_tensor(whole, shard.contiguous(), group=mesh.get_group())
    return whole[: len(weight)]
