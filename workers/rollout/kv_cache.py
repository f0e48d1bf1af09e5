"""The embedded engine's keys and values.

Rows [0, n) of the cache are the running sequences, the longest first as far as that is cheap to keep. Time is cut into chunks.
A chunk holds all rows' tokens of its span, and attention reads, chunk by chunk, rows up to the last one that reaches so
far: nobody pays for the longest row, growing copies little, and a full chunk is one stream of memory. That reads at about
twice the speed of strips cut from a cache with room at the end of every row (256 rows of 64 tokens, 2 heads of 64, fp32,
one thread: 1.35 ms a layer against 2.9).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

LANES = 16  # lengths of chunks and widths of score matrices are multiples of this: softmax over fewer columns runs unvectorised


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
        # Small chunks waste little at the end of rows, many of them cost dispatch: on a GPU that is what counts.
        smallest, most = (64, 16) if device.type == "cpu" else (512, 4)
        self.chunk = round_up(min(max_length, max(smallest, math.ceil(max_length / most))), LANES)
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
        chunks, capacity = int(self.chunks_of(np.array(length))), len(self.clean)
        if kept == 0:
            self.clean = [0] * capacity
        if rows > self.slots or chunks > capacity:
            if chunks > capacity:
                capacity = min(max(chunks, 2 * capacity, math.ceil(256 / self.chunk)), self.max_chunks)
            self.slots = max(rows, min(expected_rows, self.max_rows))
            before = [min(clean, kept) for clean in self.clean]
            self.clean = before + [0] * (capacity - len(before))
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


def round_up(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple
