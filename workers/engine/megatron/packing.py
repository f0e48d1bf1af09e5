"""A micro-batch as the ranks of a model see it: packed, padded, cut over contexts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from workers.batch import Batch
from workers.engine.hf.packed_attention import PackedRows
from workers.engine.megatron.context import ContextCut
from workers.engine.megatron.packed_gpt import Packed
from workers.engine.micro_batch import flat_rows

Rotary = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Pack:
    """rows: the micro-batch, on the device. is_dummy: it stands for no rows. The rest is of this rank's tokens: input_ids and
    positions, int64 (T / cp,), T being ``padded`` tokens.
    """

    rows: Batch
    is_dummy: bool
    padded: int
    input_ids: Tensor
    positions: Tensor
    packed: Packed


def pack(rows: Batch, config: TransformerConfig, rotary: Rotary, *, is_dummy: bool) -> Pack:
    """One more row, without weight, pads the tokens until context and sequence parallelism divide them."""
    device = rows.tokens["input_ids"].device
    cp = config.context_parallel_size
    unit = (2 * cp if cp > 1 else 1) * (config.tensor_model_parallel_size if config.sequence_parallel else 1)
    ids, positions, lengths = flat_rows(rows, unit)
    cut = ContextCut.of(lengths, parallel_state.get_context_parallel_group(), device) if cp > 1 else None
    if cut is not None:
        ids, positions = ids[cut.place], positions[cut.place]
    cos, sin = rotary(torch.zeros((), dtype=config.params_dtype, device=device), positions[None])
    packed = Packed(qkv_format="thd", rows=PackedRows.of(lengths, device), cut=cut, cos=cos[0], sin=sin[0])
    return Pack(rows, is_dummy, sum(lengths), ids, positions, packed)
