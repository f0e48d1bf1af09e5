"""Attention of the embedded engine: one forward mixes decoding rows, which attend to the KV cache, and whole prompts.

transformers calls ``cached_attention`` in every layer, as the attention implementation CACHED_ATTENTION. The state of the step is
not global: it travels as the keyword argument ``step`` of the model's forward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from workers.engine.hf.packed_attention import PackedRows, packed_attention
from workers.rollout.kv_cache import LANES, CacheShape, KVCache, round_up

CACHED_ATTENTION = "tandem_cached"


@dataclass(frozen=True, slots=True)
class CacheSpan:
    """One chunk of the cache as read in a step: rows [0, rows) read the positions [start, stop)."""

    chunk: int
    rows: int
    start: int
    stop: int


class Attends(Protocol):
    """Interface of the model forward's argument ``step``."""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> Tensor: ...


class StepAttention:
    """Attention in one forward over flat tokens: one token of each decoding row, then the prompts, concatenated.

    Keys and values of both are written to the cache. Decoding rows attend to their row of the cache, prompts to themselves.
    """

    def __init__(self, cache: KVCache, lengths: np.ndarray, prompt_lengths: Sequence[int]) -> None:
        """lengths (n,): tokens already in the cache for the decoding rows, which are rows [0, n).

        prompt_lengths: lengths of the prompts, in descending order; they fill rows [n, n + prompts).
        """
        self.cache, self.lengths = cache, lengths
        self.decoding = len(lengths)
        self.prompts = PackedRows.of(prompt_lengths, cache.device) if prompt_lengths else None
        prompt_rows = np.repeat(np.arange(len(prompt_lengths)) + self.decoding, prompt_lengths)
        prompt_positions = [np.arange(length) for length in prompt_lengths]
        self.positions = np.concatenate([lengths, *prompt_positions])
        self.places = cache.places(np.concatenate([np.arange(self.decoding), prompt_rows]), self.positions)
        chunks = cache.chunks_of(lengths + 1)
        # A span is a prefix of the rows, so a row is read as far as any row after it reaches: maximum over the suffix.
        last_reader = np.maximum.accumulate(chunks[::-1])[::-1]
        self.excess = int((last_reader - chunks).sum())
        """Number of chunks that are read for rows that do not reach them; 0 if rows are ordered by length."""
        longest = int(lengths.max(initial=-1)) + 1
        self.spans = [
            CacheSpan(chunk, int((last_reader > chunk).sum()), start, min(start + cache.chunk, round_up(longest, LANES)))
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
        **kwargs: Any,
    ) -> Tensor:
        """Attend over the flat tokens: query (1, heads, T, D), key and value (1, kv heads, T, D) -> (1, T, heads, D)."""
        n, layer = self.decoding, module.layer_idx
        assert isinstance(layer, int)
        # Write before reading: a decoding token attends to itself through the cache.
        self.cache.write(layer, self.places, key[0].transpose(0, 1), value[0].transpose(0, 1))
        parts = []  # outputs in the order of the tokens: decoding rows first
        if n:
            parts.append(self._decode(layer, query[0, :, :n].transpose(0, 1), scaling, sliding_window)[None])
        if self.prompts is not None:
            query, key, value = query[:, :, n:], key[:, :, n:], value[:, :, n:]
            kwargs |= {"packed_rows": self.prompts, "scaling": scaling, "sliding_window": sliding_window}
            parts.append(packed_attention(module, query, key, value, attention_mask, **kwargs)[0])
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _decode(self, layer: int, query: Tensor, scaling: float | None, window: int | None) -> Tensor:
        """Attend one token per row to the cache: query (n, heads, D) -> (n, heads, D).

        The heads that share a kv head (grouped-query attention) are the rows of one matrix product.
        """
        n, heads, head_dim = query.shape
        kv_heads = self.cache.shape.kv_heads
        keys, values = (pool[layer].flatten(1, 2) for pool in self.cache.pools)
        query = (query * (head_dim**-0.5 if scaling is None else scaling)).reshape(n * kv_heads, heads // kv_heads, head_dim)
        mask = self._mask(window)
        # Rows that end before a chunk are not computed there: their scores stay -inf, hence probability 0.
        scores = query.new_full((n, heads, mask.shape[-1]), -math.inf)
        for span in self.spans:
            rows, width = span.rows, span.stop - span.start
            strips = keys[span.chunk, : rows * kv_heads, :width]
            products = torch.bmm(query[: rows * kv_heads], strips.transpose(1, 2)).view(rows, heads, width)
            columns = slice(span.start, span.stop)
            torch.add(products, mask[:rows, :, columns], out=scores[:rows, :, columns])
        # In float32, as in transformers' eager attention.
        probs = scores.softmax(-1, dtype=torch.float32).to(query.dtype).view(n * kv_heads, heads // kv_heads, -1)
        # All rows read the first chunk, which creates the output; later chunks add to the rows that reach them.
        first, *others = self.spans
        out = torch.bmm(probs[:, :, : first.stop], values[0, : n * kv_heads, : first.stop])
        for span in others:
            strips = values[span.chunk, : span.rows * kv_heads, : span.stop - span.start]
            part = probs[: span.rows * kv_heads, :, span.start : span.stop]
            out[: span.rows * kv_heads].baddbmm_(part, strips)
        return out.view(n, heads, -1)

    def _mask(self, window: int | None) -> Tensor:
        """Additive mask (n, 1, columns): 0 where a decoding row attends, -inf elsewhere. Cached per window size."""
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
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention implementation for transformers, called in every attention layer with the forward's ``step``."""
    return step.attend(module, query, key, value, attention_mask, **kwargs), None


class ShapeProbe:
    """Record the shapes of keys and values in a forward on the meta device.

    Configs name these sizes in too many ways to read them from there.
    """

    def __init__(self) -> None:
        self.layers: dict[int, tuple[int, int, int]] = {}

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> Tensor:
        assert isinstance(module.layer_idx, int)
        self.layers[module.layer_idx] = (key.shape[1], key.shape[-1], value.shape[-1])
        rows = PackedRows.of([query.shape[2]], query.device)
        return packed_attention(module, query, key, value, attention_mask, packed_rows=rows, **kwargs)[0]


def probe_cache_shape(model: PreTrainedModel) -> CacheShape:
    """Determine the shape of the KV cache of ``model``, a causal LM on the meta device.

    Raises ValueError if layers differ in the shapes of keys and values, which the cache cannot hold.
    """
    probe = ShapeProbe()
    tokens = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    experts = model.get_experts_implementation()
    model.set_experts_implementation("batched_mm")  # the other implementations do not run on the meta device
    model(input_ids=tokens, position_ids=tokens, use_cache=False, step=probe)
    model.set_experts_implementation(experts)
    shapes = set(probe.layers.values())
    if len(shapes) != 1 or sorted(probe.layers) != list(range(len(probe.layers))):
        raise ValueError(
            f"the embedded engine needs like attention in every layer; here (heads, key, value) by layer: {probe.layers}"
        )
    return CacheShape(len(probe.layers), *shapes.pop())


AttentionInterface.register(CACHED_ATTENTION, cached_attention)
