"""The embedded engine's keys and values, and attention over them.

Rows [0, n) of the cache are the running sequences, the longest first as far as that is cheap to keep. Time is cut into chunks.
A chunk holds all rows' tokens of its span, and attention reads, chunk by chunk, rows up to the last one that reaches so
far: nobody pays for the longest row, growing copies little, and a full chunk is one stream of memory. That reads at about
twice the speed of strips cut from a cache with room at the end of every row (256 rows of 64 tokens, 2 heads of 64, fp32,
one thread: 1.35 ms a layer against 2.9).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from workers.engine.attention import PackedRows, packed_attention

CACHED_ATTENTION = "tandem_cached"
LANES = 16  # widths of score matrices are multiples of this: softmax over fewer columns runs unvectorised


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What one token needs in each layer."""

    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int


class KVCache:
    """pools: keys and values, each (layers, chunks, slots, kv heads, chunk length, head dim)."""

    def __init__(self, shape: CacheShape, max_rows: int, max_length: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.max_rows, self.dtype, self.device = shape, max_rows, dtype, device
        # Small chunks waste little at the end of rows; many of them cost dispatch. So no less than 64, no more than 16 of them.
        self.chunk = _round_up(min(max_length, max(64, math.ceil(max_length / 16))), LANES)
        self.max_chunks = math.ceil(max_length / self.chunk)
        self.drop()

    def drop(self) -> None:
        """Give the memory back."""
        self.slots = 0
        self.pools: list[Tensor] = []
        self.clean: list[int] = []  # of each chunk, rows [0, clean) are finite

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self.pools)

    def chunks_of(self, lengths: np.ndarray) -> np.ndarray:
        return -(-lengths // self.chunk)

    def reserve(self, rows: int, length: int, *, kept: int, expected_rows: int) -> None:
        """Make room for ``rows`` rows of up to ``length`` tokens. The first ``kept`` rows keep what they have.

        expected_rows: how many may come soon, so that slots grow once.
        """
        chunks = int(self.chunks_of(np.array(length)))
        if kept == 0:
            self.clean = [0] * len(self.clean)
        if rows > self.slots or chunks > len(self.clean):
            self.slots = max(rows, min(expected_rows, self.max_rows))
            before = [min(clean, kept) for clean in self.clean]
            self.clean = before + [0] * (min(max(chunks, 2 * len(before), 4), self.max_chunks) - len(before))
            self.pools = [self._grown(i, len(before), kept) for i in range(2)]
        # Stale numbers are masked, but 0 * NaN is NaN: what attention may read must be finite.
        for chunk in range(chunks):
            if self.clean[chunk] < rows:
                for pool in self.pools:
                    pool[:, chunk, self.clean[chunk] : rows].zero_()
                self.clean[chunk] = rows

    def _grown(self, index: int, chunks: int, kept: int) -> Tensor:
        shape = self.shape
        head_dim = (shape.key_dim, shape.value_dim)[index]
        size = (shape.layers, len(self.clean), self.slots, shape.kv_heads, self.chunk, head_dim)
        pool = torch.empty(size, dtype=self.dtype, device=self.device)
        if kept:
            pool[:, :chunks, :kept] = self.pools[index][:, :chunks, :kept]
        return pool

    def copy(self, source: np.ndarray, target: np.ndarray, lengths: np.ndarray) -> None:
        """Rows ``source`` to rows ``target``, the first ``lengths`` tokens of each. Every source is read before it is written."""
        runs: list[list[int]] = []  # source, length, first and last of neighbouring targets that get the same
        for row, place, length in zip(source.tolist(), target.tolist(), lengths.tolist(), strict=True):
            if runs and runs[-1][:2] == [row, length] and runs[-1][3] == place - 1:
                runs[-1][3] = place
            else:
                runs.append([row, length, place, place])
        # One strip at a time: indexing with tensors copies element by element, 6 times slower for a single row.
        for pool in self.pools:
            strips = []
            for row, length, first, last in runs:
                for chunk, start in enumerate(range(0, length, self.chunk)):
                    strips.append((chunk, first, last, pool[:, chunk, row : row + 1, :, : length - start].clone()))
            for chunk, first, last, strip in strips:
                pool[:, chunk, first : last + 1, :, : strip.shape[3]] = strip

    def places(self, rows: np.ndarray, positions: np.ndarray) -> Tensor:
        """Where ``write`` puts the tokens of these rows at these positions: int64 (T * kv heads,)."""
        chunk, offset = np.divmod(positions, self.chunk)
        strip = (chunk * self.slots + rows)[:, None] * self.shape.kv_heads + np.arange(self.shape.kv_heads)
        return torch.from_numpy((strip * self.chunk + offset[:, None]).ravel()).to(self.device)

    def write(self, layer: int, places: Tensor, key: Tensor, value: Tensor) -> None:
        """key, value: (T, kv heads, D)."""
        for pool, states in zip(self.pools, (key, value), strict=True):
            pool[layer].view(-1, states.shape[-1]).index_copy_(0, places, states.reshape(-1, states.shape[-1]))


@dataclass(frozen=True, slots=True)
class Span:
    """rows: how many read this chunk; start, stop: the positions they read in it."""

    chunk: int
    rows: int
    start: int
    stop: int


class Attends(Protocol):
    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: object
    ) -> Tensor: ...


class StepAttention:
    """Attention in one forward over flat tokens: one token of each decoding row, then whole prompts, end to end.

    Both go into the cache. Decoding rows attend to their row of the cache, prompts to themselves.
    """

    def __init__(self, cache: KVCache, lengths: np.ndarray, prompt_lengths: Sequence[int]) -> None:
        """lengths: tokens the n decoding rows have in the cache so far; theirs are rows [0, n). prompt_lengths: of the
        prompts, the longest first, which fill rows [n, n + prompts)."""
        self.cache, self.lengths = cache, lengths
        self.decoding = len(lengths)
        self.prompts = PackedRows.of(prompt_lengths, cache.device) if prompt_lengths else None
        prompt_rows = np.repeat(np.arange(len(prompt_lengths)) + self.decoding, prompt_lengths)
        prompt_positions = [np.arange(length) for length in prompt_lengths]
        self.positions = np.concatenate([lengths, *prompt_positions])
        self.places = cache.places(np.concatenate([np.arange(self.decoding), prompt_rows]), self.positions)
        chunks = cache.chunks_of(lengths + 1)
        last_reader = np.maximum.accumulate(chunks[::-1])[::-1]
        self.excess = int((last_reader - chunks).sum())
        """Chunks that are read for rows which do not reach so far."""
        longest = int(lengths.max(initial=-1)) + 1
        self.spans = [
            Span(chunk, int((last_reader > chunk).sum()), start, min(start + cache.chunk, _round_up(longest, LANES)))
            for chunk, start in enumerate(range(0, longest, cache.chunk))
        ]
        self._masks: dict[object, Tensor] = {}

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **kwargs: object,
    ) -> Tensor:
        """query (1, heads, T, D), key and value (1, kv heads, T, D) -> (1, T, heads, D)."""
        n, layer = self.decoding, module.layer_idx
        assert isinstance(layer, int)
        self.cache.write(layer, self.places, key[0].transpose(0, 1), value[0].transpose(0, 1))
        parts = []
        if n:
            parts.append(self._decode(layer, query[0, :, :n].transpose(0, 1), scaling, sliding_window)[None])
        if self.prompts is not None:
            states = (query[:, :, n:], key[:, :, n:], value[:, :, n:])
            window = {"scaling": scaling, "sliding_window": sliding_window}
            parts.append(packed_attention(module, *states, attention_mask, packed_rows=self.prompts, **window, **kwargs)[0])
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _decode(self, layer: int, query: Tensor, scaling: float | None, window: int | None) -> Tensor:
        """query (n, heads, D) -> (n, heads, D). The heads that share a kv head are the rows of one matrix product."""
        n, heads, head_dim = query.shape
        kv_heads = self.cache.shape.kv_heads
        keys, values = (pool[layer].flatten(1, 2) for pool in self.cache.pools)
        query = (query * (head_dim**-0.5 if scaling is None else scaling)).reshape(n * kv_heads, heads // kv_heads, head_dim)
        mask = self._mask(window)
        scores = query.new_full((n, heads, mask.shape[-1]), -math.inf)
        for span in self.spans:
            rows, width = span.rows, span.stop - span.start
            strips = keys[span.chunk, : rows * kv_heads, :width]
            products = torch.bmm(query[: rows * kv_heads], strips.transpose(1, 2)).view(rows, heads, width)
            columns = slice(span.start, span.stop)
            torch.add(products, mask[:rows, :, columns], out=scores[:rows, :, columns])
        probs = scores.softmax(-1, dtype=torch.float32).to(query.dtype).view(n * kv_heads, heads // kv_heads, -1)
        first, *others = self.spans
        out = torch.bmm(probs[:, :, : first.stop], values[0, : n * kv_heads, : first.stop])
        for span in others:
            strips = values[span.chunk, : span.rows * kv_heads, : span.stop - span.start]
            part = probs[: span.rows * kv_heads, :, span.start : span.stop]
            out[: span.rows * kv_heads].baddbmm_(part, strips)
        return out.view(n, heads, -1)

    def _mask(self, window: int | None) -> Tensor:
        """0 where a decoding row may look, -inf elsewhere: (n, 1, columns)."""
        if window not in self._masks:
            column, last = np.arange(self.spans[-1].stop), self.lengths[:, None]
            seen = (column <= last) if window is None else (column <= last) & (column > last - window)
            mask = np.where(seen, np.float32(0), np.float32(-np.inf))[:, None]
            self._masks[window] = torch.from_numpy(mask).to(self.cache.device, self.cache.dtype)
        return self._masks[window]


def cached_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    step: Attends,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """transformers calls this in every attention layer, with the ``step`` that the forward was given."""
    return step.attend(module, query, key, value, attention_mask, **kwargs), None


class ShapeProbe:
    """Finds the shapes of keys and values by a forward on the meta device, instead of from a config's many dialects."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[int, int, int]] = {}

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: object
    ) -> Tensor:
        assert isinstance(module.layer_idx, int)
        self.layers[module.layer_idx] = (key.shape[1], key.shape[-1], value.shape[-1])
        rows = PackedRows.of([query.shape[2]], query.device)
        return packed_attention(module, query, key, value, attention_mask, packed_rows=rows, **kwargs)[0]


def probe_cache_shape(model: nn.Module) -> CacheShape:
    """model: a causal LM on the meta device. Raises ValueError for attention that the cache cannot hold."""
    probe = ShapeProbe()
    tokens = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    model(input_ids=tokens, position_ids=tokens, use_cache=False, step=probe)
    shapes = set(probe.layers.values())
    if len(shapes) != 1 or sorted(probe.layers) != list(range(len(probe.layers))):
        raise ValueError(f"the embedded engine needs like attention in every layer; here (heads, key, value) by layer: {probe.layers}")
    return CacheShape(len(probe.layers), *shapes.pop())


def _round_up(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple


AttentionInterface.register(CACHED_ATTENTION, cached_attention)
