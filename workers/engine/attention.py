"""Attention over packed rows, for any transformers model that takes its attention from the AttentionInterface.

Rows lie end to end in one sequence of T tokens; each attends causally to itself alone. No (T, T) mask is ever built: the
name is registered for attention only, and transformers makes no mask for a name its mask interface does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from workers.determinism import repeat_backward
from workers.engine.ulysses import TokenCut

PACKED_ATTENTION = "tandem_packed"


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Where the rows of a packed sequence lie. Made once a micro-batch, used by every layer.

    blocks: (rows, length) of each run of neighbours that are equally long; such a run is one attention call on the CPU.
    Measured (4k tokens, one thread): runs of exactly equal length are as fast as padding like lengths to the longest,
    from 14 to 300 tokens a row, because padding has to copy. So rows should come sorted by length; any order is right.
    cu_seqlens: int32 (B + 1,), where each row starts, and the end.
    cut: how the tokens are cut over ranks; None: this rank has them all.
    """

    blocks: tuple[tuple[int, int], ...]
    cu_seqlens: Tensor
    longest: int
    cut: TokenCut | None

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device, cut: TokenCut | None = None) -> PackedRows:
        """lengths: tokens of each of the B rows, all positive."""
        blocks = tuple((len(list(run)), length) for length, run in groupby(lengths))
        ends = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
        return cls(blocks, ends, max(lengths), cut)

    def own(self, whole: Tensor) -> Tensor:
        """(T, ...) -> those tokens that this rank has."""
        return whole if self.cut is None else self.cut.own(whole)

    def own_places(self, places: Tensor, total: int) -> Tensor:
        """int64 (N,) among all ``total`` tokens -> those of them that this rank has, among its own."""
        return places if self.cut is None else self.cut.own_places(places, total)

    def whole(self, mine: Tensor) -> Tensor:
        """Of this rank's tokens -> (T, ...), of all."""
        return mine if self.cut is None else self.cut.whole(mine)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_rows: PackedRows,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """query (1, heads, T, D), key and value (1, kv heads, T, D) -> (1, T, heads, D), T being this rank's tokens. Dropout is never
    applied.

    sliding_window: a token sees itself and the ``sliding_window - 1`` before it. Raises ValueError for what is not
    plain attention over whole rows: a mask of the model's own, capped scores, sinks.
    """
    if attention_mask is not None or softcap is not None or s_aux is not None:
        raise ValueError(f"{type(module).__name__}: packed attention supports no masks, score caps or sinks of a model's own")
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    cut = packed_rows.cut
    if cut is not None:
        q, k, v = cut.to_heads(q, k, v)
    out = _whole_rows_attention(q, k, v, packed_rows, scaling, sliding_window)
    return (out if cut is None else cut.to_tokens(out))[None], None


def _whole_rows_attention(
    q: Tensor, k: Tensor, v: Tensor, rows: PackedRows, scaling: float | None, sliding_window: int | None
) -> Tensor:
    """q (T, heads, D), k and v (T, kv heads, D) -> (T, heads, D)."""
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        places = rows.cu_seqlens, rows.longest
        return varlen(q, k, v, places, places, scaling=scaling, sliding_window=sliding_window)
    # split, never slices: each slice's backward writes a buffer of full length.
    sizes = [n * length for n, length in rows.blocks]
    parts = zip(rows.blocks, q.split(sizes), k.split(sizes), v.split(sizes), strict=True)
    return torch.cat([_block_attention(*part, scaling, sliding_window) for part in parts])


def _block_attention(
    block: tuple[int, int], q: Tensor, k: Tensor, v: Tensor, scaling: float | None, sliding_window: int | None
) -> Tensor:
    """q (rows * length, heads, D), k and v (rows * length, kv heads, D) -> (rows * length, heads, D)."""
    q, k, v = (x.unflatten(0, block).transpose(1, 2) for x in (q, k, v))
    length, band = block[1], None
    if sliding_window is not None and sliding_window < length:
        band = torch.ones(length, length, dtype=torch.bool, device=q.device).tril().triu(1 - sliding_window)
    out = scaled_dot_product_attention(q, k, v, attn_mask=band, is_causal=band is None, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)


def varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: tuple[Tensor, int],
    keys: tuple[Tensor, int],
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
) -> Tensor:
    """The same on CUDA, all rows in one kernel: q (T, heads, D), k and v (T', kv heads, D) -> (T, heads, D).

    queries, keys: where each row starts, and the end, int32 (B + 1,); and the longest. A row's last query sits at its last key.
    """
    from torch.nn.attention.varlen import varlen_attn

    left = -1 if sliding_window is None else sliding_window - 1
    attend: Callable[..., Tensor | tuple[Tensor, Tensor]] = varlen_attn
    if "enable_gqa" in signature(varlen_attn).parameters:
        attend = partial(varlen_attn, enable_gqa=True)
    else:  # torch 2.11: as many key heads as query heads
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    out = attend(q, k, v, queries[0], keys[0], queries[1], keys[1], scale=scaling, window_size=(left, 0))
    assert isinstance(out, Tensor)
    repeat_backward(out)
    return out


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
