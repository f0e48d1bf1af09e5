"""State of the running sequences in columns (numpy), one row per sequence, in the same order as the rows of the KV cache.

Columns instead of objects, so that a decode step updates all sequences with a few array operations instead of a Python loop.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workers.rollout.base import Response
from workers.rollout.sampling import stream_keys


@dataclass(slots=True)
class RowSequence(Response):
    """A response. While it runs, it is in the columns of RunningRows; ``RunningRows.collect`` copies it to here.

    order: number of the submission, by which results are sorted. has_old_keys: the keys and values of its prompt are of earlier
    weights than the engine's.
    """

    order: int = 0
    has_old_keys: bool = False


ROW = np.dtype(
    [
        ("sequence", object),
        ("cached", np.int64),  # tokens whose keys and values are in the cache
        ("count", np.int64),  # tokens of the response so far
        ("limit", np.int64),  # maximum tokens of the response
        ("last_token", np.int64),  # not in the cache yet
        ("key", np.uint64),  # of the random stream, sampling.stream_keys
        ("temperature", np.float64),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("stop_set", np.int64),  # row of the stop table
    ]
)


class RunningRows:
    """Table of the running sequences: rows [0, n) are in use.

    stop_table: (stop sets, V), True where a token ends a response; requests with equal stop tokens share a row.
    """

    def __init__(self, max_rows: int, max_length: int, vocab_size: int) -> None:
        self.table = np.zeros(max_rows, dtype=ROW)
        self.n = 0
        self.max_length, self.vocab_size = max_length, vocab_size
        # Large, but memory is committed page by page on first write: rows that are never used cost nothing.
        self.token_ids = np.empty((max_rows, max_length), dtype=np.int64)
        self.log_probs = np.empty((max_rows, max_length), dtype=np.float32)
        self._stop_sets: dict[tuple[int, ...], int] = {}
        self.stop_table = np.zeros((0, vocab_size), dtype=bool)

    def __getitem__(self, name: str) -> np.ndarray:
        """A column of the running rows (n,), as a writable view."""
        return self.table[name][: self.n]

    @property
    def sequences(self) -> list[RowSequence]:
        return self["sequence"].tolist()

    def add(self, sequences: list[RowSequence]) -> None:
        """Append rows for ``sequences``. All known tokens except the last count as cached: the step's forward computes them."""
        keys = stream_keys([sequence.request.seed for sequence in sequences])
        for sequence, key in zip(sequences, keys, strict=True):
            request, known = sequence.request, sequence.known
            sampling, begun, count = request.sampling, len(request.response_ids), len(known) - len(request.prompt_ids)
            # A response also ends when prompt and response together reach the maximum length.
            limit = min(sampling.max_tokens, self.max_length - len(request.prompt_ids))
            stop_set = self._stop_set(() if sampling.ignore_eos else sampling.stop_token_ids)
            self.table[self.n] = (
                *(sequence, len(known) - 1, count, limit, known[-1], key),
                *(sampling.temperature, sampling.top_k, sampling.top_p, stop_set),
            )
            self.token_ids[self.n, begun:count] = sequence.token_ids
            self.log_probs[self.n, begun:count] = sequence.log_probs
            self.n += 1

    def append(self, token_ids: np.ndarray, log_probs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Append one token to every row; both arguments (n,).

        Returns two masks, bool (n,): rows that ended with a stop token, and rows that ended for any reason.
        """
        rows, count = np.arange(self.n), self["count"]
        self.token_ids[rows, count], self.log_probs[rows, count] = token_ids, log_probs
        self["cached"][:] += 1
        count += 1  # a view: this updates the column, after the token was stored at the old count
        self["last_token"][:] = token_ids
        stopped = self.stop_table[self["stop_set"], token_ids]
        return stopped, stopped | (count >= self["limit"])

    def collect(self, rows: np.ndarray) -> list[RowSequence]:
        """Bring the sequences of these rows up to date; returns them in order of submission. The rows stay."""
        sequences = []
        for row in rows.tolist():
            sequence, count = self.table["sequence"][row], int(self.table["count"][row])
            start = len(sequence.request.response_ids) + len(sequence.token_ids)
            sequence.token_ids += self.token_ids[row, start:count].tolist()
            sequence.log_probs += self.log_probs[row, start:count].tolist()
            sequences.append(sequence)
        return sorted(sequences, key=lambda sequence: sequence.order)

    def move(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copy rows ``source`` to rows ``target``, both (k,). The cache's rows must be moved in the same way."""
        # Copy as many columns as the longest response needs, not max_length.
        longest = int(self.table["count"][source].max(initial=0))
        self.token_ids[target, :longest] = self.token_ids[source, :longest]
        self.log_probs[target, :longest] = self.log_probs[source, :longest]
        self.table[target] = self.table[source]

    def truncate(self, n: int) -> None:
        """Keep the first ``n`` rows."""
        self["sequence"][n:] = None  # releases the objects
        self.n = n

    def _stop_set(self, stop_token_ids: tuple[int, ...]) -> int:
        """Row of ``stop_table`` for these stop tokens, added on first use."""
        if stop_token_ids not in self._stop_sets:
            self._stop_sets[stop_token_ids] = len(self._stop_sets)
            row = np.isin(np.arange(self.vocab_size), stop_token_ids)
            self.stop_table = np.vstack([self.stop_table, row[None]])
        return self._stop_sets[stop_token_ids]
