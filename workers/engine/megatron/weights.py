"""Hugging Face names and Megatron's, as one table; and tensors from one to the other, cut over tensor-parallel ranks.

    model.embed_tokens.weight                 embedding.word_embeddings.weight        rows (vocabulary, padded)
    model.layers.N.self_attn.{q,k,v}_proj     layers.N.self_attention.linear_qkv      groups of heads
    model.layers.N.mlp.{gate,up}_proj         layers.N.mlp.linear_fc1                 each one's rows
    ...

A family is added by a name in model.SUPPORTED, and lines here for what it has beside these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig

LAYER = "model.layers.{n}."
OURS = "decoder.layers.{n}."

Cut = Callable[[Sequence[Tensor], int, int], Tensor]
"""Of the whole tensors of a line: what rank r of n holds, as Megatron keeps it."""
Join = Callable[[Sequence[Tensor]], list[Tensor]]
"""Of all ranks' parts: the whole tensors."""


@dataclass(frozen=True, slots=True)
class Line:
    """theirs: Hugging Face names of the tensors that ``ours`` is made of."""

    ours: str
    theirs: tuple[str, ...]
    cut: Cut
    join: Join


def table(config: PretrainedConfig, head: str) -> list[Line]:
    """Every tensor of the model, layers in order. Of tied ones the first."""
    lines = [Line("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), *vocabulary(config.vocab_size))]
    for n in range(config.num_hidden_layers):
        lines += [
            Line(OURS.format(n=n) + line.ours, tuple(LAYER.format(n=n) + name for name in line.theirs), line.cut, line.join)
            for line in layer_table(config)
        ]
    lines.append(Line("decoder.final_layernorm.weight", ("model.norm.weight",), *whole()))
    if head == "value":
        lines += [Line(f"output_layer.{leaf}", (f"score.{leaf}",), *whole()) for leaf in ("weight", "bias")]
    elif not config.tie_word_embeddings:
        lines.append(Line("output_layer.weight", ("lm_head.weight",), *vocabulary(config.vocab_size)))
    return lines


def layer_table(config: PretrainedConfig) -> list[Line]:
    """One decoder layer; names below it."""
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    biased = config.model_type == "qwen2" or bool(getattr(config, "attention_bias", False))
    lines = [
        Line("input_layernorm.weight", ("input_layernorm.weight",), *whole()),
        *(
            Line(f"self_attention.linear_qkv.{leaf}", tuple(f"{name}.{leaf}" for name in qkv), *head_groups(groups, dim))
            for leaf in ("weight", "bias")[: 1 + biased]
        ),
        Line("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), *columns()),
        Line("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), *whole()),
        Line("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), *rows_of_each()),
        Line("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), *columns()),
    ]
    if config.model_type == "qwen3":
        lines += [Line(f"self_attention.{x}_layernorm.weight", (f"self_attn.{x}_norm.weight",), *whole()) for x in "qk"]
    return lines


def whole() -> tuple[Cut, Join]:
    """The same on every rank."""
    return lambda tensors, rank, size: tensors[0], lambda parts: [parts[0]]


def columns() -> tuple[Cut, Join]:
    return lambda tensors, rank, size: tensors[0].chunk(size, 1)[rank], lambda parts: [torch.cat(list(parts), 1)]


def rows_of_each() -> tuple[Cut, Join]:
    """(a, b) -> a's rows of the rank, then b's."""

    def join(parts: Sequence[Tensor]) -> list[Tensor]:
        halves = [part.chunk(2) for part in parts]
        return [torch.cat([half[i] for half in halves]) for i in range(2)]

    return lambda tensors, rank, size: torch.cat([tensor.chunk(size)[rank] for tensor in tensors]), join


def vocabulary(size: int) -> tuple[Cut, Join]:
    """Rows, padded with zeros until the ranks divide them."""

    def cut(tensors: Sequence[Tensor], rank: int, ranks: int) -> Tensor:
        rows = -(-size // ranks)
        mine = tensors[0][rank * rows : (rank + 1) * rows]
        return torch.cat([mine, mine.new_zeros(rows - len(mine), *mine.shape[1:])])

    return cut, lambda parts: [torch.cat(list(parts))[:size]]


def head_groups(groups: int, dim: int) -> tuple[Cut, Join]:
    """(q, k, v) -> for each group of the rank: its queries' rows, its key's, its value's. Of weights (rows, H) or biases (rows,)."""

    def cut(tensors: Sequence[Tensor], rank: int, ranks: int) -> Tensor:
        here = groups // ranks
        q, k, v = (tensor.unflatten(0, (groups, -1))[rank * here : (rank + 1) * here] for tensor in tensors)
        return torch.cat([q, k, v], 1).flatten(0, 1)

    def join(parts: Sequence[Tensor]) -> list[Tensor]:
        together = torch.cat(list(parts)).unflatten(0, (groups, -1))
        queries = together.shape[1] - 2 * dim
        return [part.flatten(0, 1) for part in together.split([queries, dim, dim], 1)]

    return cut, join
