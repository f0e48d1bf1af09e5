"""Attention over packed rows, for any transformers model that uses AttentionInterface.

Rows are concatenated into one sequence of T tokens; each attends causally to itself alone. No (T, T) mask is ever built: the name
is registered for attention only, and transformers creates no mask for a name that its mask interface does not know.

On CUDA in bfloat16 or float16 one variable-length kernel computes all rows. Elsewhere each run of equally long rows is one SDPA
call, so rows should be sorted by length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from workers.determinism import make_backward_deterministic
from workers.engine.micro_batch import to_device
from workers.engine.shared_prefixes import SharedPrefixes
from workers.engine.ulysses import TokenSharding

PACKED_ATTENTION = "tandem_packed"
TAKES_GROUPS = "enable_gqa" in signature(varlen_attn).parameters  # torch 2.11 requires as many key heads as query heads

Ends = tuple[Tensor, int]
"""Start of each of n stretches of tokens, and the end: int32 (n + 1,); and the length of the longest."""


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Layout of the rows of a packed sequence. Created once per micro-batch, used by every layer.

    blocks: (stretches, queries, keys) of each run of equally long neighbours; on the CPU a run is one attention call. Measured
    (4k tokens, one thread): runs of exactly equal length are as fast as padding similar lengths to the longest, from 14 to 300
    tokens per row, because padding has to copy. Rows should be sorted by length; any order is correct.
    queries, keys: where stretches are among the computed tokens, and among the tokens that these attend to. The last query of a
    stretch is aligned with its last key. Without shared prefixes stretches are rows, and queries equal keys.
    last: int64 (B,), the last token of each row among all T.
    shared: which tokens are computed; None: all. cut: split of these over ranks; None: this rank has all.
    """

    blocks: tuple[tuple[int, int, int], ...]
    queries: Ends
    keys: Ends
    last: Tensor
    cut: TokenSharding | None
    shared: SharedPrefixes | None

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        device: torch.device,
        *,
        cut: TokenSharding | None = None,
        shared: SharedPrefixes | None = None,
    ) -> PackedRows:
        """Build the layout. lengths: tokens of each of the B rows, all positive."""
        sizes = [(n, n) for n in lengths] if shared is None else [(s.length, s.seen) for s in shared.stretches]
        blocks = tuple((len(list(run)), *size) for size, run in groupby(sizes))
        queries, keys = (_ends(column, device) for column in zip(*sizes, strict=True))
        last = to_device(torch.tensor(lengths).cumsum(0) - 1, device)
        return cls(blocks, queries, keys, last, cut, shared)

    def own(self, whole: Tensor) -> Tensor:
        """Select the tokens that this rank computes: (T, ...) -> (computed, ...)."""
        computed = whole if self.shared is None else whole.index_select(0, self.shared.computed)
        return computed if self.cut is None else self.cut.own(computed)

    def whole(self, mine: Tensor) -> Tensor:
        """Inverse of ``own``: (computed, ...) -> (T, ...), with a collective if tokens are split over ranks."""
        computed = mine if self.cut is None else self.cut.whole(mine)
        return computed if self.shared is None else computed.index_select(0, self.shared.places)

    def before(self, predicted: Tensor, total: int) -> tuple[Tensor, Tensor]:
        """Locate the predecessors of predicted tokens: the head computes a token's log-prob from the state before it.

        predicted: int64 (N,), among all ``total`` tokens, none the first of its row. Returns the predicted tokens whose
        predecessor this rank computes, int64 (M,), and the index of that predecessor among its own tokens, int64 (M,).
        """
        places = predicted - 1 if self.shared is None else self.shared.places[predicted - 1]
        if self.cut is None:
            return predicted, places
        mine, here = self.cut.own_places(places, total if self.shared is None else len(self.shared.computed))
        return predicted[mine], here

    def answers(self, found: Tensor, predicted: Tensor, total: int) -> Tensor:
        """Scatter results (M, ...) for the tokens that ``before`` returned to (total, ...), 0 for tokens not predicted."""
        mine = found.new_zeros(total, *found.shape[1:]).index_copy(0, predicted, found)
        # Each token's predecessor is on exactly one rank.
        return mine if self.cut is None else self.cut.sum(mine)


def _ends(lengths: Sequence[int], device: torch.device) -> Ends:
    """Cumulative offsets, int32 (n + 1,), and the largest length."""
    # int32 is what variable-length kernels take.
    return to_device(torch.tensor([0, *lengths]).cumsum(0).int(), device), max(lengths)


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
    """Attention function registered with transformers: query (1, heads, T, D), key and value (1, kv heads, T, D).

    T counts the tokens that this rank computes. Returns (1, T, heads, D), and None for attention weights. Dropout is never
    applied. sliding_window: a token attends to itself and the ``sliding_window - 1`` before it. Raises ValueError for anything
    but plain attention over complete rows: a mask of the model's own, capped scores, sinks.

    In a compiled layer the CUDA kernel is part of the layer's graph. Code that reads sizes of rows on the host or communicates
    cannot be: the layer is then compiled in two parts, before and after attention.
    """
    if attention_mask is not None or softcap is not None or s_aux is not None:
        raise ValueError(f"{type(module).__name__}: packed attention supports no masks, score caps or sinks of a model's own")
    attend = _attend_in_graph if _can_trace(query, packed_rows) else _attend
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    return attend(q, k, v, packed_rows, scaling, sliding_window)[None], None


def _has_kernel(q: Tensor) -> bool:
    """Whether one variable-length kernel computes all rows."""
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)


def _can_trace(q: Tensor, rows: PackedRows) -> bool:
    # make_backward_deterministic hooks into autograd's graph, which does not exist while a layer is traced.
    return _has_kernel(q) and rows.cut is None and not torch.are_deterministic_algorithms_enabled()


def _attend_in_graph(
    q: Tensor, k: Tensor, v: Tensor, rows: PackedRows, scaling: float | None, sliding_window: int | None
) -> Tensor:
    k, v = _seen(k, v, rows)
    return varlen(q, k, v, rows.queries, rows.keys, scaling=scaling, sliding_window=sliding_window)


def _seen(k: Tensor, v: Tensor, rows: PackedRows) -> tuple[Tensor, Tensor]:
    """Keys and values that the computed tokens attend to, (K, kv heads, D) each: those of a shared prefix several times."""
    if rows.shared is None:
        return k, v
    return k.index_select(0, rows.shared.seen), v.index_select(0, rows.shared.seen)


@torch.compiler.disable
def _attend(q: Tensor, k: Tensor, v: Tensor, rows: PackedRows, scaling: float | None, sliding_window: int | None) -> Tensor:
    """q (T, heads, D), k and v (T, kv heads, D) -> (T, heads, D); T as this rank has them."""
    cut = rows.cut
    if cut is not None:
        q, k, v = cut.to_heads(q, k, v)
    # After the exchange, where a rank has all computed tokens of its heads: the keys of a prefix may be another rank's.
    k, v = _seen(k, v, rows)
    out = _whole_rows_attention(q, k, v, rows, scaling, sliding_window)
    return out if cut is None else cut.to_tokens(out)


def _whole_rows_attention(
    q: Tensor, k: Tensor, v: Tensor, rows: PackedRows, scaling: float | None, sliding_window: int | None
) -> Tensor:
    """q (T, heads, D), k and v (K, kv heads, D) -> (T, heads, D)."""
    if _has_kernel(q):
        return varlen(q, k, v, rows.queries, rows.keys, scaling=scaling, sliding_window=sliding_window)
    # split(), not slices: the backward of each slice would write a buffer of the full length.
    queries, keys = [n * length for n, length, _ in rows.blocks], [n * seen for n, _, seen in rows.blocks]
    parts = zip(rows.blocks, q.split(queries), k.split(keys), v.split(keys), strict=True)
    return torch.cat([_block_attention(*part, scaling, sliding_window) for part in parts])


def _block_attention(
    block: tuple[int, int, int], q: Tensor, k: Tensor, v: Tensor, scaling: float | None, sliding_window: int | None
) -> Tensor:
    """Attention of n stretches of equal size.

    q (n * length, heads, D), k and v (n * seen, kv heads, D) -> (n * length, heads, D).
    """
    n, length, seen = block
    q, k, v = (x.unflatten(0, (n, -1)).transpose(1, 2) for x in (q, k, v))
    band = None
    if length < seen or (sliding_window is not None and sliding_window < seen):
        # is_causal aligns the first query with the first key; here the last ones are aligned, so a mask is needed.
        before = seen - length
        band = torch.ones(length, seen, dtype=torch.bool, device=q.device).tril(before)
        if sliding_window is not None:
            band = band.triu(before + 1 - sliding_window)
    out = scaled_dot_product_attention(q, k, v, attn_mask=band, is_causal=band is None, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)


def varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Ends,
    keys: Ends,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
) -> Tensor:
    """Attention of all rows in one CUDA kernel: q (T, heads, D), k and v (T', kv heads, D) -> (T, heads, D).

    queries, keys: start of each row and the end, int32 (B + 1,), and the longest. A row's last query is aligned with its last
    key.
    """
    left = -1 if sliding_window is None else sliding_window - 1
    if not TAKES_GROUPS:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    groups: dict[str, Any] = {"enable_gqa": True} if TAKES_GROUPS else {}
    out = varlen_attn(q, k, v, queries[0], keys[0], queries[1], keys[1], scale=scaling, window_size=(left, 0), **groups)
    assert isinstance(out, Tensor)
    if not torch.compiler.is_compiling():
        make_backward_deterministic(out)
    return out


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
