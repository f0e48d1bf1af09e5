"""Flat batch: the tokens of all sequences concatenated, plus their lengths.

A padded (B, longest) layout spends memory, traffic and compute on padding. Here per-token columns are flat (T, ...), and a
sequence is a slice of them given by ``lengths``. The cost is index arithmetic: selecting rows is a gather of token indices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor


def repeat_rows(values: Tensor, lengths: Tensor) -> Tensor:
    """The value of its row at each token: values (B,), lengths (B,) -> (T,)."""
    if lengths.device.type != "cpu":
        return torch.repeat_interleave(values, lengths)
    # NumPy fills runs of equal values ten times as fast as torch's gather.
    return torch.from_numpy(np.repeat(values.numpy(), lengths.numpy()))


@dataclass
class Batch:
    """B sequences with T = sum(lengths) tokens.

    lengths: int64 (B,)            tokens of each sequence, prompt plus response
    tokens:  {name: (T, ...)}      per token: input_ids, response_mask, log_probs, values, loss_weight, ...
    rows:    {name: (B, ...)}      per sequence: group (of its prompt), trajectory, part, uid (data row), score, last_value, ...
    objects: {name: list of B}     strings and other Python objects; controller only, never sent to workers
    meta:    {name: json}          for the whole batch: temperature, step

    ``log_probs[t]`` is the log-prob of token t given the tokens before it (0 for the first token of a sequence); ``values[t]`` is
    the value of the state before token t. A sequence is never split. tokens["response_mask"] alone marks what is trained, also
    between tokens that are not (observations); rows["prompt_length"] is a hint for computing a shared prefix once.
    """

    lengths: Tensor
    tokens: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)
    objects: dict[str, list[Any]] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.lengths.dtype == torch.int64 and self.lengths.dim() == 1, "lengths: int64 (B,)"
        total = self.total_tokens
        for name, value in self.tokens.items():
            assert len(value) == total, f"tokens[{name!r}] has {len(value)} entries, the batch {total} tokens"
        for name, column in (self.rows | self.objects).items():
            assert len(column) == len(self), f"{name!r} has {len(column)} entries, the batch {len(self)} sequences"

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def total_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def offsets(self) -> Tensor:
        """Start of each sequence in the flat columns, followed by T: int64 (B + 1,)."""
        return torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0))

    def segment_ids(self) -> Tensor:
        """Row index of each token: int64 (T,)."""
        return repeat_rows(torch.arange(len(self)), self.lengths)

    def positions(self) -> Tensor:
        """Position of each token in its sequence: int64 (T,)."""
        return torch.arange(self.total_tokens) - repeat_rows(self.offsets[:-1], self.lengths)

    def split_rows(self, name: str) -> list[Tensor]:
        """Split ``tokens[name]`` into the B sequences."""
        return list(self.tokens[name].split(self.lengths.tolist()))

    def select(self, indices: Sequence[int] | Tensor) -> Batch:
        """Gather the rows at ``indices``, in that order; an index may occur more than once."""
        rows = torch.as_tensor(indices, dtype=torch.int64)
        starts, lengths = self.offsets[:-1][rows], self.lengths[rows]
        ends = lengths.cumsum(0)
        # Source index of each output token: its output index, shifted by (start in the source - start in the output) of its row.
        where = torch.arange(int(lengths.sum())) + repeat_rows(starts - (ends - lengths), lengths)
        return Batch(
            lengths=lengths,
            tokens={name: value.index_select(0, where) for name, value in self.tokens.items()},
            rows={name: value.index_select(0, rows) for name, value in self.rows.items()},
            objects={name: [column[i] for i in rows.tolist()] for name, column in self.objects.items()},
            meta=dict(self.meta),
        )

    def chunk(self, n: int) -> list[Batch]:
        """Split into ``n`` parts of consecutive rows whose sizes differ by at most one."""
        return [self.select(part) for part in torch.arange(len(self)).tensor_split(n)]

    @staticmethod
    def concat(parts: Sequence[Batch]) -> Batch:
        """Concatenate batches with equal columns; ``meta`` is taken from the first. Raises ValueError if columns differ."""
        first = parts[0]
        for part in parts[1:]:
            for kind in ("tokens", "rows", "objects"):
                mine, other = getattr(first, kind).keys(), getattr(part, kind).keys()
                if mine != other:
                    raise ValueError(f"cannot concat batches with unequal {kind}: {sorted(mine)} and {sorted(other)}")
        return Batch(
            lengths=torch.cat([part.lengths for part in parts]),
            tokens={name: torch.cat([part.tokens[name] for part in parts]) for name in first.tokens},
            rows={name: torch.cat([part.rows[name] for part in parts]) for name in first.rows},
            objects={name: [item for part in parts for item in part.objects[name]] for name in first.objects},
            meta=dict(first.meta),
        )

    def union(self, other: Batch) -> Batch:
        """Merge the columns of two batches; ``other`` wins where both have a column. Raises ValueError if lengths differ."""
        if not torch.equal(self.lengths, other.lengths):
            raise ValueError(f"cannot unite batches of other lengths: {len(self)} and {len(other)} sequences")
        return Batch(
            lengths=self.lengths,
            tokens=self.tokens | other.tokens,
            rows=self.rows | other.rows,
            objects=self.objects | other.objects,
            meta=self.meta | other.meta,
        )

    __or__ = union

    def only(self, *, tokens: Sequence[str] = (), rows: Sequence[str] = ()) -> Batch:
        """Keep the named columns and ``meta``. ``objects`` are dropped: they are never sent to workers."""
        return Batch(
            lengths=self.lengths,
            tokens={name: self.tokens[name] for name in tokens},
            rows={name: self.rows[name] for name in rows},
            meta=self.meta,
        )

    def with_tokens(self, **columns: Tensor) -> Batch:
        """Copy with per-token columns (T, ...) added or replaced; other columns are shared, not copied."""
        return replace(self, tokens=self.tokens | columns)

    def with_rows(self, **columns: Tensor) -> Batch:
        """Copy with per-sequence columns (B, ...) added or replaced; other columns are shared, not copied."""
        return replace(self, rows=self.rows | columns)

    def with_meta(self, meta: Mapping[str, Any]) -> Batch:
        """Copy with entries of ``meta`` added or replaced; columns are shared, not copied."""
        return replace(self, meta=self.meta | dict(meta))
