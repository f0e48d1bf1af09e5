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

LONG_ROW = 128
"""Tokens of a row, on average, above which rows are copied one by one."""


def repeat_rows(values: Tensor, lengths: Tensor) -> Tensor:
    """The value of its row at each token: values (B,), lengths (B,) -> (T,)."""
    if lengths.device.type != "cpu":
        return torch.repeat_interleave(values, lengths)
    # NumPy fills runs of equal values ten times as fast as torch's gather.
    return torch.from_numpy(np.repeat(values.numpy(), lengths.numpy()))


def counts_in(mask: Tensor, lengths: Tensor) -> Tensor:
    """Number of tokens of each row in ``mask`` (T,): int64 (B,)."""
    # NumPy counts a slice at memory speed: indices of all tokens in the mask would take ten times as long.
    chosen, ends = mask.bool().cpu().numpy(), lengths.cumsum(0).tolist()
    counts = [np.count_nonzero(chosen[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
    return torch.tensor(counts, dtype=torch.int64, device=mask.device)


@dataclass
class Batch:
    """B sequences with T = sum(lengths) tokens.

    lengths: int64 (B,)            tokens of each sequence, prompt plus response
    tokens:  {name: (T, ...)}      per token: input_ids, response_mask, log_probs, values, loss_weight, ...
    rows:    {name: (B, ...)}      per sequence: group (of its prompt), trajectory, part, uid (data row), score, last_value, ...
    objects: {name: list of B}     strings and other Python objects; never sent to workers, which may return them
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
        return Batch.concat([self], torch.as_tensor(indices, dtype=torch.int64))

    def chunk(self, n: int) -> list[Batch]:
        """Split into ``n`` parts of consecutive rows whose sizes differ by at most one."""
        return [self.select(part) for part in torch.arange(len(self)).tensor_split(n)]

    @staticmethod
    def concat(parts: Sequence[Batch], order: Tensor | None = None) -> Batch:
        """Concatenate batches with equal columns; ``meta`` is taken from the first. Raises ValueError if columns differ.

        order, int64 (N,): rows of the concatenation, in that order, of which the result consists; None: all of them as they are.
        """
        first = parts[0]
        for part in parts[1:]:
            for kind in ("tokens", "rows", "objects"):
                mine, other = getattr(first, kind).keys(), getattr(part, kind).keys()
                if mine != other:
                    raise ValueError(f"cannot concat batches with unequal {kind}: {sorted(mine)} and {sorted(other)}")
        lengths = torch.cat([part.lengths for part in parts])
        tokens = {name: [part.tokens[name] for part in parts] for name in first.tokens}
        rows = {name: torch.cat([part.rows[name] for part in parts]) for name in first.rows}
        objects = {name: [item for part in parts for item in part.objects[name]] for name in first.objects}
        if order is None:
            return Batch(lengths, {name: torch.cat(columns) for name, columns in tokens.items()}, rows, objects, dict(first.meta))
        return Batch(
            lengths=lengths[order],
            tokens=_in_order(tokens, [part.lengths for part in parts], order),
            rows={name: column.index_select(0, order.to(column.device)) for name, column in rows.items()},
            objects={name: [column[i] for i in order.tolist()] for name, column in objects.items()},
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


def _in_order(columns: Mapping[str, Sequence[Tensor]], lengths: Sequence[Tensor], order: Tensor) -> dict[str, Tensor]:
    """Token columns of the rows ``order`` of a concatenation. columns: by name, those of each part. lengths: of each part."""
    of_row = torch.cat(list(lengths))
    chosen = of_row[order]
    total, by_slices = int(chosen.sum()), list[str]()
    # Long rows are copied one by one, straight from their parts. For short ones a gather by the index of each token is faster.
    if total > LONG_ROW * len(order):
        by_slices = [name for name, parts in columns.items() if all(map(_is_array, parts))]
    found: dict[str, Tensor] = {}
    if by_slices:
        parts = repeat_rows(torch.arange(len(lengths)), torch.tensor([len(part) for part in lengths]))[order].tolist()
        starts = torch.cat([part.cumsum(0) - part for part in lengths])[order]
        places = list(zip(parts, starts.tolist(), (starts + chosen).tolist(), strict=True))
        for name in by_slices:
            arrays = [part.numpy() for part in columns[name]]
            found[name] = torch.from_numpy(np.concatenate([arrays[part][start:end] for part, start, end in places]))
    if rest := [name for name in columns if name not in found]:
        starts, ends = (of_row.cumsum(0) - of_row)[order], chosen.cumsum(0)
        # Source index of each output token: its output index, shifted by (start in the source - start in the output) of its row.
        where = torch.arange(total) + repeat_rows(starts - (ends - chosen), chosen)
        for name in rest:
            whole = columns[name][0] if len(lengths) == 1 else torch.cat(list(columns[name]))
            found[name] = whole.index_select(0, where.to(whole.device))  # lengths of a micro-batch on a GPU are on the CPU
    return {name: found[name] for name in columns}


def _is_array(column: Tensor) -> bool:
    """Whether NumPy can view the column."""
    return column.device.type == "cpu" and not column.requires_grad and column.dtype != torch.bfloat16
