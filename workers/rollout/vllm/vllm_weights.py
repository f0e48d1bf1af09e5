"""Where vLLM keeps the trainer's tensors: fused, cut over tensor-parallel ranks, padded, tied. For verification.

It follows from the sizes that layers compute with, not from what their loaders did.
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
    """Rows [row, row + rows) of vLLM's tensor, of one expert's if it is one of many, are rows (dim 0) or columns (dim 1)
    [start, start + size) of the trainer's."""

    name: str
    row: int
    rows: int
    dim: int
    start: int
    size: int
    expert: int | None = None

    def of(self, tensor: Tensor) -> Tensor:
        return tensor.narrow(self.dim, self.start, self.size)


Packed = Callable[[nn.Module, str, Sequence[Part]], list[HeldWeight]]


def held_weights(model: nn.Module, tied: Mapping[str, str], dtype: torch.dtype, packed: Packed) -> list[HeldWeight]:
    """tied: the first name for others. dtype: what vLLM was told to keep weights in. packed: for a layer that computes with
    something else than rows of this parameter, else nothing."""
    fused: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})  # models without fused layers have none
    found: list[HeldWeight] = []
    for path, module in model.named_modules():
        for leaf in dict(module.named_parameters(recurse=False)):
            parts = parts_of(path, leaf, module, fused, tied)
            if own := packed(module, leaf, parts):
                found += own
            elif parts:
                found += [PlainWeight(part.name, partial(rows_of, module, leaf, part), part.of, dtype) for part in parts]
            else:
                name = f"{path}.{leaf}"
                found.append(PlainWeight(tied.get(name, name), partial(module.get_parameter, leaf), dtype=dtype))
    return found


def rows_of(module: nn.Module, leaf: str, part: Part) -> Tensor:
    parameter = module.get_parameter(leaf)
    return (parameter if part.expert is None else parameter[part.expert]).narrow(0, part.row, part.rows)


def parts_of(path: str, leaf: str, module: nn.Module, fused: Mapping[str, Sequence[str]], tied: Mapping[str, str]) -> list[Part]:
    """What the parameter ``leaf`` of the layer at ``path`` is made of on this rank; nothing: it is the trainer's, whole."""
    name = f"{path}.{leaf}"
    match module:
        case VocabParallelEmbedding():
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
    rows = accumulate((size for size, _, _ in blocks), initial=0)
    begins = accumulate((whole for _, _, whole in blocks), initial=0)
    if len(names) == 1:  # fused in the trainer too
        return [
            Part(names[0], row, size, 0, begin + rank * size, size)
            for (size, rank, _), row, begin in zip(blocks, rows, begins, strict=False)
        ]
    return [Part(of, row, size, 0, rank * size, size) for of, (size, rank, _), row in zip(names, blocks, rows, strict=False)]


def blocks_of(layer: Any) -> list[tuple[int, int, int]]:
    """(rows here, which share of them this is, rows in all) of each block that is cut by itself, in vLLM's order.

    Where there are fewer heads of keys and values than ranks, ranks share one.
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
    """Each expert's parts of ``w13_weight`` (experts, gate and up, hidden) or ``w2_weight`` (experts, hidden, down)."""
    config, above = experts.moe_config, path.removesuffix(".experts.routed_experts")
    size, hidden = config.intermediate_size_per_partition_unpadded, config.hidden_dim_unpadded
    start, half = config.tp_rank * size, experts.get_parameter(leaf).shape[1] // 2
    places = {"w1": (0, size, 0), "w3": (half, size, 0), "w2": (0, hidden, 1)}
    found = []
    for parameter, name, expert, place in experts.get_expert_mapping():
        if leaf.startswith(parameter.removeprefix("experts.")):
            row, rows, dim = places[place]
            found.append(Part(f"{above}.{name}weight", row, rows, dim, start, size, expert))
    return found
