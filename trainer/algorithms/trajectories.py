"""Trajectory view: the rows of a conversation as one sequence.

A conversation of several turns is one row or, where a later turn does not continue the tokens of an earlier one, several: its
parts. The row of a part is a context, which is not trained, and the tokens that were sampled after it. Statistics, discounts
and sequence ratios belong to the trajectory, not to its rows. The rows of a trajectory, concatenated in the order of their parts,
are one row in which the repeated contexts are further holes in response_mask. Functions of rows that skip untrained tokens are
therefore functions of trajectories when they get the concatenated rows. The cost is a gather per column; nothing is copied if
every trajectory is one row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.batch import Batch

PART = ("trajectory", "part")
"""Row columns that name a part: number of the trajectory in the run, and of the part in the trajectory."""


@dataclass(frozen=True, slots=True)
class Trajectories:
    """The N trajectories of a batch of B rows with T tokens, in the order of their first rows.

    row_lengths (B,): tokens of each row. lengths (N,): tokens of each trajectory, over all its parts. of_row (B,): trajectory of
    each row. last (N,): row of each trajectory's last part. order, inverse (T,): index in the batch of each token of the joined
    rows, and the reverse; None if every trajectory is one row.
    """

    row_lengths: Tensor
    lengths: Tensor
    of_row: Tensor
    last: Tensor
    order: Tensor | None = None
    inverse: Tensor | None = None

    @classmethod
    def single_rows(cls, batch: Batch) -> Trajectories:
        """View of ``batch`` in which every row is a trajectory."""
        rows = torch.arange(len(batch))
        return cls(batch.lengths, batch.lengths, rows, rows)

    @classmethod
    def of(cls, batch: Batch) -> Trajectories:
        """View of ``batch`` by its rows trajectory and part (B,). Without these columns every row is a trajectory.

        The rows of a trajectory may be anywhere in the batch. They have one group and different parts.
        """
        if not set(PART) <= batch.rows.keys():
            return cls.single_rows(batch)
        # On the CPU, where the lengths of a micro-batch are.
        number, part = (batch.rows[name].cpu() for name in PART)
        _, index = torch.unique(number, return_inverse=True)
        n = int(index.max()) + 1 if len(index) else 0
        if n == len(batch):
            return cls.single_rows(batch)
        # Trajectories by their first rows: the order must not depend on their numbers.
        first = torch.full((n,), len(batch)).scatter_reduce(0, index, torch.arange(len(batch)), "amin")
        of_row = first.argsort().argsort()[index]
        rows = part.argsort(stable=True)
        rows = rows[of_row[rows].argsort(stable=True)]
        last = rows[torch.bincount(of_row).cumsum(0) - 1]
        same = of_row[rows][1:] == of_row[rows][:-1]
        assert (part[rows].diff()[same] > 0).all(), "two rows are the same part of a trajectory"
        if "group" in batch.rows:
            group = batch.rows["group"].cpu()
            assert torch.equal(group[last][of_row], group), "rows of a trajectory are in different groups"
        order = Batch(batch.lengths, {"order": torch.arange(batch.total_tokens)}).select(rows).tokens["order"]
        lengths = torch.zeros(n, dtype=torch.int64).index_add(0, of_row, batch.lengths)
        return cls(batch.lengths, lengths, of_row, last, order, order.argsort())

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def are_rows(self) -> bool:
        """Whether every trajectory is one row."""
        return self.order is None

    def gather(self, column: Tensor) -> Tensor:
        """A token column of the batch in the order of the joined rows: (T, ...), differentiable."""
        return column if self.order is None else column.index_select(0, self.order.to(column.device))

    def split(self, column: Tensor) -> Tensor:
        """A token column of the joined rows in the order of the batch, the inverse of ``gather``: (T, ...), differentiable."""
        return column if self.inverse is None else column.index_select(0, self.inverse.to(column.device))

    def joined(self, batch: Batch) -> Batch:
        """The N trajectories as rows. Row columns and objects are those of the last part, where a trajectory ends."""
        if self.are_rows:
            return batch
        # Without tokens, which would be copied for nothing.
        last = Batch(torch.ones_like(batch.lengths), rows=batch.rows, objects=batch.objects, meta=batch.meta).select(self.last)
        return Batch(
            self.lengths, {name: self.gather(column) for name, column in batch.tokens.items()}, last.rows, last.objects, last.meta
        )

    def split_columns(self, columns: Mapping[str, Tensor]) -> Batch:
        """Token columns (T, ...) of the joined rows as columns of the batch's rows."""
        return Batch(self.row_lengths, tokens={name: self.split(column) for name, column in columns.items()})
