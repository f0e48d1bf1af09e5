"""KV cache of the embedded engine: chunked along the sequence, with rows ordered by length.

Problem: decoding reads the whole cache in every step, and rows have different lengths. A dense (rows, longest) cache reads
padding for every short row, and growing it copies everything.

Idea: positions are divided into chunks of equal length. A chunk stores the tokens of all rows in its span contiguously. Rows
[0, n) are the running sequences, the longest first as far as that order is cheap to maintain. Attention reads chunk by chunk, in
each only the rows up to the last one that reaches it. Short rows therefore do not pay for the longest one, growing copies little,
and a full chunk is one sequential read: about twice as fast as slices of a cache with spare room at the end of every row (256
rows of 64 tokens, 2 heads of 64, fp32, one thread: 1.35 ms per layer instead of 2.9 ms).

Cost: rows out of order are read beyond their end (``StepAttention.excess``), and restoring the order copies rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# Chunk lengths and widths of score matrices are multiples of this: softmax over fewer columns is not vectorised.
LANES = 16


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Number of layers, and the dimensions of one token's keys and values in each."""

    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int


class KVCache:
    """Keys and values of the running rows.

    pools: keys and values, each (layers, chunks, slots, kv heads, chunk length, head dim). Allocated by ``reserve``; a new cache
    holds no memory.
    """

    def __init__(self, shape: CacheShape, max_rows: int, max_length: int, dtype: torch.dtype, device: torch.device) -> None:
        """max_rows: maximum number of running sequences. max_length: maximum length of prompt and response, in tokens."""
        self.shape, self.max_rows, self.dtype, self.device = shape, max_rows, dtype, device
        # Small chunks waste little at the end of rows, but each chunk costs kernel launches, which dominate on a GPU.
        smallest, most = (64, 16) if device.type == "cpu" else (512, 4)
        self.chunk = round_up(min(max_length, max(smallest, math.ceil(max_length / most))), LANES)
        self.max_chunks = math.ceil(max_length / self.chunk)
        self.drop()

    def drop(self) -> None:
        """Release the memory."""
        self.slots = 0
        self.pools: list[Tensor] = []
        self.clean: list[int] = []  # per chunk: rows [0, clean) contain finite numbers

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self.pools)

    def chunks_of(self, lengths: np.ndarray) -> np.ndarray:
        """Number of chunks that rows of these lengths reach into, int64 (n,)."""
        return -(-lengths // self.chunk)

    def reserve(self, rows: int, length: int, *, kept: int, expected_rows: int) -> None:
        """Allocate room for ``rows`` rows of up to ``length`` tokens. The first ``kept`` rows keep their contents.

        expected_rows: number of rows expected soon, so that slots grow only once.
        """
        chunks, capacity = int(self.chunks_of(np.array(length))), len(self.clean)
        if kept == 0:
            self.clean = [0] * capacity
        if rows > self.slots or chunks > capacity:
            if chunks > capacity:
                # Doubling makes the total cost of copies linear in the final length.
                capacity = min(max(chunks, 2 * capacity, math.ceil(256 / self.chunk)), self.max_chunks)
            self.slots = max(rows, min(expected_rows, self.max_rows))
            before = [min(clean, kept) for clean in self.clean]
            self.clean = before + [0] * (capacity - len(before))
            self.pools = [self._grown(i, len(before), kept) for i in range(2)]
        # Attention masks stale positions with probability 0, but 0 * NaN is NaN: uninitialised memory that it may read must be
        # finite, so it is zeroed once.
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
        """Copy the first ``lengths`` tokens of rows ``source`` to rows ``target``; all int64 (n,).

        Every source is read before any target is written, so that source and target may overlap (a permutation of rows).
        """
        runs: list[list[int]] = []  # source, length, first and last of adjacent targets with the same source
        for row, place, length in zip(source.tolist(), target.tolist(), lengths.tolist(), strict=True):
            if runs and runs[-1][:2] == [row, length] and runs[-1][3] == place - 1:
                runs[-1][3] = place
            else:
                runs.append([row, length, place, place])
        # One slice at a time: advanced indexing copies element by element, 6 times slower for a single row.
        for pool in self.pools:
            strips = []
            for row, length, first, last in runs:
                for chunk, start in enumerate(range(0, length, self.chunk)):
                    strips.append((chunk, first, last, pool[:, chunk, row : row + 1, :, : length - start].clone()))
            for chunk, first, last, strip in strips:
                pool[:, chunk, first : last + 1, :, : strip.shape[3]] = strip

    def places(self, rows: np.ndarray, positions: np.ndarray) -> Tensor:
        """Indices at which ``write`` stores tokens; rows and positions (T,). Returns int64 (T * kv heads,)."""
        chunk, offset = np.divmod(positions, self.chunk)
        strip = (chunk * self.slots + rows)[:, None] * self.shape.kv_heads + np.arange(self.shape.kv_heads)
        return torch.from_numpy((strip * self.chunk + offset[:, None]).ravel()).to(self.device)

    def write(self, layer: int, places: Tensor, key: Tensor, value: Tensor) -> None:
        """Store key and value (T, kv heads, D) of one layer at ``places``."""
        for pool, states in zip(self.pools, (key, value), strict=True):
            pool[layer].view(-1, states.shape[-1]).index_copy_(0, places, states.reshape(-1, states.shape[-1]))


def round_up(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple
