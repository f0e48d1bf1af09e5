"""Locations of the trainer's tensors in vLLM (fused, sharded over tensor-parallel ranks, padded, tied), for verification.

They are derived from the sizes that layers compute with, not from what their loaders did: a loader that misplaces a tensor must
not be able to confirm itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from workers.rollout.verification import HeldWeight, PlainWeight


@dataclass(frozen=True, slots=True)
class Part:
    """Correspondence of rows of vLLM's tensor and a slice of the trainer's tensor ``name``.

    Rows [row, row + rows) of vLLM's tensor (of ``expert``, if it stacks several) are rows (dim 0) or columns (dim 1)
    [start, start + size) of the trainer's.
    """

    name: str
    row: int
    rows: int
    dim: int
    start: int
    size: int
    expert: int | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """View of the slice of the trainer's tensor."""
        return tensor.narrow(self.dim, self.start, self.size)


Packed = Callable[[nn.Module, str, Sequence[Part]], list[HeldWeight]]
"""(layer, parameter name, parts) -> held weights, for layers that do not compute with the parameter itself; else []."""


def held_weights(model: nn.Module, tied: Mapping[str, str], dtype: torch.dtype, packed: Packed) -> list[HeldWeight]:
    """All weights that this rank of vLLM computes with.

    tied: {name: first name of the same tensor}. dtype: the dtype that vLLM was configured with. packed: for layers that compute
    with something other than rows of the parameter.
    """
    fused: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})  # models without fused layers have none
    found: list[HeldWeight] = []
    for path, module in model.named_modules():
        for leaf in dict(module.named_parameters(recurse=False)):
            parts = parts_of(path, leaf, module, fused, tied)
            # Packed copies take precedence: the layer does not compute with the parameter then.
            if own := packed(module, leaf, parts):
                found += own
            elif parts:
                found += [PlainWeight(part.name, partial(rows_of, module, leaf, part), part.of, dtype) for part in parts]
            else:
                name = f"{path}.{leaf}"
                found.append(PlainWeight(tied.get(name, name), partial(module.get_parameter, leaf), dtype=dtype))
    return found


def rows_of(module: nn.Module, leaf: str, part: Part) -> Tensor:
    """View of the rows of a part in vLLM's parameter. Looked up on each call: sleep replaces the parameter's data."""
    parameter = module.get_parameter(leaf)
    return (parameter if part.expert is None else parameter[part.expert]).narrow(0, part.row, part.rows)


def parts_of(path: str, leaf: str, module: nn.Module, fused: Mapping[str, Sequence[str]], tied: Mapping[str, str]) -> list[Part]:
    """Parts of the parameter ``leaf`` of the layer at ``path`` on this rank; empty if it is the trainer's tensor as a whole.

    fused: {vLLM's layer: names of the layers that it fuses}.
    """
    name = f"{path}.{leaf}"
    match module:
        case VocabParallelEmbedding():
            # Only the original vocabulary: padding rows correspond to nothing in the trainer.
            start, stop = module.shard_indices.org_vocab_start_index, module.shard_indices.org_vocab_end_index
            return [Part(tied.get(name, name), 0, stop - start, 0, start, stop - start)]
        case RowParallelLinear() if leaf == "weight":
            size = module.input_size_per_partition
            return [Part(name, 0, module.output_size, 1, module.tp_rank * size, size)]
        case ReplicatedLinear() if leaf == "weight":
            return [Part(name, 0, module.output_size, 0, 0, module.output_size)]
        case RoutedExperts():
            return experts_of(path, leaf, module)
        case ColumnParallelLinear():
            blocks = blocks_of(module)
        case _:
            return []
    above, _, own = path.rpartition(".")
    names = [f"{above}.{part}.{leaf}" for part in fused.get(own, [own])]
    # Blocks follow each other in vLLM's tensor by their size on this rank, in a tensor fused in the trainer by their full size.
    rows = accumulate((size for size, _, _ in blocks), initial=0)
    begins = accumulate((whole for _, _, whole in blocks), initial=0)
    if len(names) == 1:  # fused in the trainer too
        return [
            Part(names[0], row, size, 0, begin + rank * size, size)
            for (size, rank, _), row, begin in zip(blocks, rows, begins, strict=False)
        ]
    return [Part(of, row, size, 0, rank * size, size) for of, (size, rank, _), row in zip(names, blocks, rows, strict=False)]


def blocks_of(layer: Any) -> list[tuple[int, int, int]]:
    """Blocks of a layer that are sharded separately, in vLLM's order: (rows on this rank, index of the shard, rows in total).

    With fewer kv heads than ranks, heads are replicated: several ranks hold the same shard.
    """
    match layer:
        case QKVParallelLinear():
            share = layer.tp_rank // layer.num_kv_head_replicas
            keys, values = layer.head_size, layer.v_head_size
            return [
                (layer.num_heads * keys, layer.tp_rank, layer.total_num_heads * keys),
                (layer.num_kv_heads * keys, share, layer.total_num_kv_heads * keys),
                (layer.num_kv_heads * values, share, layer.total_num_kv_heads * values),
            ]
        case MergedColumnParallelLinear():
            return [(size // layer.tp_size, layer.tp_rank, size) for size in layer.output_sizes]
        case _:
            return [(layer.output_size_per_partition, layer.tp_rank, layer.output_size)]


def experts_of(path: str, leaf: str, experts: Any) -> list[Part]:
    """Parts of every expert in ``w13_weight`` (experts, gate and up, hidden) or ``w2_weight`` (experts, hidden, down)."""
    config, above = experts.moe_config, path.removesuffix(".experts.routed_experts")
    size, hidden = config.intermediate_size_per_partition_unpadded, config.hidden_dim_unpadded
    # vLLM pads what its kernel needs wider: sizes are the unpadded ones, but up (w3) begins at half of the padded rows.
    start, half = config.tp_rank * size, experts.get_parameter(leaf).shape[1] // 2
    places = {"w1": (0, size, 0), "w3": (half, size, 0), "w2": (0, hidden, 1)}
    found = []
    for parameter, name, expert, place in experts.get_expert_mapping():
        if leaf.startswith(parameter.removeprefix("experts.")):
            row, rows, dim = places[place]
            found.append(Part(f"{above}.{name}weight", row, rows, dim, start, size, expert))
    return found
