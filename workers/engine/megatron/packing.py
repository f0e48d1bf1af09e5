"""Convert a micro-batch to the form that the ranks of a Megatron model take: packed, padded, split over context ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from workers.batch import Batch
from workers.engine.hf.packed_attention import PackedRows
from workers.engine.megatron.context import ContextSharding
from workers.engine.megatron.packed_gpt import Packed
from workers.engine.micro_batch import flat_rows

Rotary = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Pack:
    """A micro-batch on this rank. rows: the micro-batch on the device. is_dummy: it stands for no rows.

    padded: T, the number of tokens including padding. input_ids, positions: int64 (T / cp,), of this rank's tokens.
    """

    rows: Batch
    is_dummy: bool
    padded: int
    input_ids: Tensor
    positions: Tensor
    packed: Packed


def pack(rows: Batch, config: TransformerConfig, rotary: Rotary, *, is_dummy: bool) -> Pack:
    """Pack a micro-batch.

    One more row, without loss weight, pads T to a multiple that context and sequence parallelism divide.
    """
    device = rows.tokens["input_ids"].device
    cp = config.context_parallel_size
    unit = (2 * cp if cp > 1 else 1) * (config.tensor_model_parallel_size if config.sequence_parallel else 1)
    ids, positions, lengths = flat_rows(rows, -rows.total_tokens % unit)
    cut = ContextSharding.of(lengths, parallel_state.get_context_parallel_group(), device) if cp > 1 else None
    if cut is not None:
        ids, positions = ids[cut.place], positions[cut.place]
    # transformers' module reads dtype and device of its first argument, and nothing else.
    cos, sin = rotary(torch.zeros((), dtype=config.params_dtype, device=device), positions[None])
    packed = Packed(qkv_format="thd", rows=PackedRows.of(lengths, device), cut=cut, cos=cos[0], sin=sin[0])
    return Pack(rows, is_dummy, sum(lengths), ids, positions, packed)
