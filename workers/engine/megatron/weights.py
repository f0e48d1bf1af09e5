"""Table of weights: Hugging Face names to Megatron names, and how Megatron splits each tensor over tensor-parallel ranks.

To add a family, add its name to limits.FAMILIES and lines here for the parameters that it has in addition.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from transformers import PretrainedConfig


class Layout(ABC):
    """How Megatron stores one or more Hugging Face tensors. dim: along which ranks hold consecutive parts; None: replicated."""

    dim: ClassVar[int | None]

    @abstractmethod
    def shard(self, tensors: Sequence[Tensor], rank: int, ranks: int) -> Tensor:
        """Full Hugging Face tensors -> this rank's tensor, in Megatron's layout."""

    @abstractmethod
    def unshard(self, part: Tensor, rank: int, ranks: int) -> list[tuple[Tensor, int]]:
        """Inverse of ``shard``: this rank's part of each Hugging Face tensor, and its offset along ``dim``."""


class Replicated(Layout):
    """Replicated on every rank: norms, value heads."""

    dim = None

    def shard(self, tensors: Sequence[Tensor], rank: int, ranks: int) -> Tensor:
        return tensors[0]

    def unshard(self, part: Tensor, rank: int, ranks: int) -> list[tuple[Tensor, int]]:
        return [(part, 0)]


class Columns(Layout):
    """Split along the input dimension: row-parallel linear layers."""

    dim = 1

    def shard(self, tensors: Sequence[Tensor], rank: int, ranks: int) -> Tensor:
        return tensors[0].chunk(ranks, 1)[rank]

    def unshard(self, part: Tensor, rank: int, ranks: int) -> list[tuple[Tensor, int]]:
        return [(part, rank * part.shape[1])]


class RowsOfEach(Layout):
    """Gate and up projection, each split by rows, concatenated: this rank's rows of gate, then of up."""

    dim = 0

    def shard(self, tensors: Sequence[Tensor], rank: int, ranks: int) -> Tensor:
        return torch.cat([tensor.chunk(ranks)[rank] for tensor in tensors])

    def unshard(self, part: Tensor, rank: int, ranks: int) -> list[tuple[Tensor, int]]:
        return [(half, rank * len(half)) for half in part.chunk(2)]


@dataclass(frozen=True, slots=True)
class Vocabulary(Layout):
    """Split by rows; the last rank's rows are padded with zeros if the ranks do not divide ``size``."""

    size: int
    dim = 0

    def shard(self, tensors: Sequence[Tensor], rank: int, ranks: int) -> Tensor:
        rows = -(-self.size // ranks)
        mine = tensors[0][rank * rows : (rank + 1) * rows]
        return torch.cat([mine, mine.new_zeros(rows - len(mine), *mine.shape[1:])])

    def unshard(self, part: Tensor, rank: int, ranks: int) -> list[tuple[Tensor, int]]:
        start = rank * len(part)
        # A rank may hold padding alone.
        return [(part[: max(0, self.size - start)], start)]


@dataclass(frozen=True, slots=True)
class HeadGroups(Layout):
    """q, k and v split by key-value group: for each group of this rank the rows of its queries, its key, its value.

    groups: number of kv heads. Applies to weights and biases.
    """

    groups: int
    head_dim: int
    dim = 0

    def shard(self, tensors: Sequence[Tensor], rank: int, ranks: int) -> Tensor:
        here = self.groups // ranks
        q, k, v = (tensor.unflatten(0, (self.groups, -1))[rank * here : (rank + 1) * here] for tensor in tensors)
        return torch.cat([q, k, v], 1).flatten(0, 1)

    def unshard(self, part: Tensor, rank: int, ranks: int) -> list[tuple[Tensor, int]]:
        grouped = part.unflatten(0, (self.groups // ranks, -1))
        queries = grouped.shape[1] - 2 * self.head_dim
        parts = [part.flatten(0, 1) for part in grouped.split([queries, self.head_dim, self.head_dim], 1)]
        return [(part, rank * len(part)) for part in parts]


@dataclass(frozen=True, slots=True)
class WeightMapping:
    """A line of the table: Megatron's parameter ``param`` consists of the Hugging Face tensors ``hf_names``."""

    param: str
    hf_names: tuple[str, ...]
    layout: Layout

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Parts of all tensor-parallel ranks -> full Hugging Face tensors."""
        if self.layout.dim is None:
            return [parts[0]]
        by_rank = [self.layout.unshard(part, rank, len(parts)) for rank, part in enumerate(parts)]
        return [torch.cat([part for part, _ in pieces], self.layout.dim) for pieces in zip(*by_rank, strict=True)]


def table(config: PretrainedConfig, head: str) -> list[WeightMapping]:
    """Every parameter that the model may have, layers in order; a reward head may lack its bias.

    A tied weight is two parameters of Megatron (embedding and head) and one Hugging Face tensor.
    """
    rows = Vocabulary(config.vocab_size)
    lines = [WeightMapping("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), rows)]
    for n in range(config.num_hidden_layers):
        for line in layer_table(config):
            hf_names = tuple(f"model.layers.{n}.{name}" for name in line.hf_names)
            lines.append(WeightMapping(f"decoder.layers.{n}.{line.param}", hf_names, line.layout))
    lines.append(WeightMapping("decoder.final_layernorm.weight", ("model.norm.weight",), Replicated()))
    if head != "lm":
        lines += [WeightMapping(f"output_layer.{leaf}", (f"score.{leaf}",), Replicated()) for leaf in ("weight", "bias")]
    else:
        tied = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        lines.append(WeightMapping("output_layer.weight", (tied,), rows))
    return lines


def layer_table(config: PretrainedConfig) -> list[WeightMapping]:
    """Lines of one decoder layer; names are relative to the layer."""
    heads = HeadGroups(config.num_key_value_heads, head_dim(config))
    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    lines = [
        WeightMapping("input_layernorm.weight", ("input_layernorm.weight",), Replicated()),
        WeightMapping("self_attention.linear_qkv.weight", tuple(f"{name}.weight" for name in qkv), heads),
        WeightMapping("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), Columns()),
        WeightMapping("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), Replicated()),
        WeightMapping("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), RowsOfEach()),
        WeightMapping("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), Columns()),
    ]
    if config.model_type == "qwen2":
        lines.append(WeightMapping("self_attention.linear_qkv.bias", tuple(f"{name}.bias" for name in qkv), heads))
    if config.model_type == "qwen3":
        for x in "qk":
            lines.append(WeightMapping(f"self_attention.{x}_layernorm.weight", (f"self_attn.{x}_norm.weight",), Replicated()))
    return lines


def head_dim(config: PretrainedConfig) -> int:
    """Size of an attention head; hidden size / heads where the config does not set it."""
    return int(config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads)
