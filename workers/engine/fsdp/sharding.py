"""How a model is cut over the ranks with ``fully_shard``, and filled with its weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from configs.schema.common import FSDPConfig
from workers.engine.hf.hf_model import DTYPES, PackedModel
from workers.engine.stored_weights import StoredWeights


def device_mesh(device: str, fsdp_size: int) -> DeviceMesh:
    """The ranks that hold one copy together, ``shard``: all of them (-1), or neighbours. Then ranks with the same part of several
    copies are the first dimension, ``replicate``: hybrid sharding, HSDP. Collective.
    """
    world = dist.get_world_size()
    if fsdp_size in (-1, world):
        return init_device_mesh(device, (world,), mesh_dim_names=("shard",))
    assert world % fsdp_size == 0, f"{world} ranks do not fall into copies over {fsdp_size}"
    return init_device_mesh(device, (world // fsdp_size, fsdp_size), mesh_dim_names=("replicate", "shard"))


def recompute_layers(model: PackedModel) -> None:
    """Keep each decoder layer's input only, and run it again in the backward. Before ``shard``, whose hooks stay outside."""
    for layer in model.layers:
        # The model is in eval mode, so there is no dropout and no random state to keep.
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def shard(model: PackedModel, mesh: DeviceMesh, fsdp: FSDPConfig) -> None:
    """Each decoder layer is gathered and freed as one; embedding, final norm and language head with the root.

    One rank that computes in the parameters' own float32 or float64 has nothing to gather or cast, and stays as it is:
    copying parameters and gradients cost 6 % of a step at 3.4M parameters and 2k tokens, and a second copy of both.
    """
    dtype = DTYPES[fsdp.dtype]
    reduce_dtype = torch.promote_types(dtype, torch.float32)
    if mesh.size() == 1 and dtype == DTYPES[fsdp.model_dtype] == reduce_dtype:
        return
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=fsdp.reshard_after_forward)
    if model.head != "lm":
        fully_shard(model.value_head, mesh=mesh, reshard_after_forward=False)  # in the parameters' own dtype
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Sum, never average: loss weights are already those of the global batch.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


@torch.no_grad()
def fill(model: PackedModel, weights: StoredWeights, given: Mapping[str, Tensor]) -> None:
    """Give every rank its part of the weights, from files. given: full tensors of what comes from elsewhere (buffers that no file
    has, a new adapter's weights), by the model's names."""
    targets: dict[str, tuple[Tensor, int]] = {}
    for name, tensor in {**dict(model.hf.named_parameters()), **dict(model.hf.named_buffers())}.items():
        here = local(tensor)
        start = sum(offsets(tensor)[:1]) * math.prod(tensor.shape[1:])
        if name in given:
            here.view(-1).copy_(given[name].flatten()[start : start + here.numel()])
        else:
            targets[name.replace(".base_layer.", ".")] = (here, start)
    weights.fill(targets)


@torch.no_grad()  # with gradients to think of, taking a shard out of a DTensor is ten times as slow
def local(tensor: Tensor) -> Tensor:
    """This rank's shard, sharing memory; a plain tensor is its own."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def one_copy(tensor: DTensor) -> DeviceMesh:
    """The ranks that hold it together with this one."""
    *replicated, cut = tensor.placements
    assert cut == Shard(0) and all(placement == Replicate() for placement in replicated), "fully_shard cuts rows"
    return tensor.device_mesh["shard"]


def copies(mesh: DeviceMesh) -> tuple[int, int]:
    """(Which copy this rank has a part of, of how many.)"""
    names = mesh.mesh_dim_names or ()
    return (mesh.get_local_rank("replicate"), mesh["replicate"].size()) if "replicate" in names else (0, 1)


def offsets(tensor: Tensor) -> list[int]:
    """Where this rank's shard begins in the full tensor, by dimension."""
    begin = [0] * tensor.dim()
    if isinstance(tensor, DTensor):
        mesh = one_copy(tensor)
        rows = -(-len(tensor) // mesh.size())
        begin[0] = min(rows * mesh.get_local_rank(), len(tensor))
    return begin


def parts(state: Mapping[str, Tensor], rank: int, copy: tuple[int, int]) -> dict[str, tuple[Tensor, list[int]]]:
    """What this rank writes, and where it begins. ``copies`` take turns; tensors that all ranks hold are the first rank's."""
    own, n_copies = copy
    return {
        name: (local(tensor), offsets(tensor))
        for i, (name, tensor) in enumerate(state.items())
        if (i % n_copies == own if isinstance(tensor, DTensor) else rank == 0)
    }


def like(param: Tensor, shard: Tensor) -> Tensor:
    """``shard`` seen as the full tensor that is sharded as ``param`` is."""
    if not isinstance(param, DTensor):
        return shard
    return DTensor.from_local(shard, param.device_mesh, param.placements, shape=param.shape, stride=param.stride())


def full(weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """All of it, on every rank; cast to ``dtype`` before it crosses if that is narrower. Collective.

    One after the other: several gathers under way at a time were 1.1 to 1.2 times as fast on two gloo ranks, and now and then
    corrupted the heap there (torch 2.13).
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
    if len(shard) < rows:  # shards must be even to be gathered
        shard = torch.cat([shard, shard.new_zeros(rows - len(shard), *shard.shape[1:])])
    whole = shard.new_empty(rows * mesh.size(), *shard.shape[1:])
    dist.all_gather_into_tensor(whole, shard.contiguous(), group=mesh.get_group())
    return whole[: len(weight)]
