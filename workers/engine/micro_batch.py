"""Micro-batches on the device, and the collection of their results in the row order of the batch."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from workers.batch import Batch
from workers.engine.base import Head, Loss
from workers.metric import Metrics

OUTPUTS = {
    "lm": {"log_probs", "entropy", "sampled_entropy", "sum_pi_squared", "top_log_probs", "all_log_probs"},
    "value": {"values"},
    "reward": {"scores"},
}
ROWS = {"lm": (), "value": ("last_value",), "reward": ("scores",)}


def longest_first(batch: Batch, chosen: Sequence[int]) -> list[int]:
    """Packing order of a micro-batch: by descending length, ties by row index. Equal lengths become one attention call."""
    lengths = batch.lengths.tolist()
    return sorted(chosen, key=lambda row: (-lengths[row], row))


def micro_batch(batch: Batch, chosen: Sequence[int], device: torch.device) -> Batch:
    """Select rows, longest first, and copy their columns to the device; ``lengths`` stay on the CPU.

    No rows: a dummy row of two zero tokens. Its loss weight is zero, and it makes the rank take part in all collectives.
    """
    if chosen:
        part = batch.select(longest_first(batch, chosen))
    else:
        part = Batch(
            lengths=torch.tensor([2]),
            tokens={name: column.new_zeros(2, *column.shape[1:]) for name, column in batch.tokens.items()},
            rows={name: column.new_zeros(1, *column.shape[1:]) for name, column in batch.rows.items()},
            meta=batch.meta,
        )
    # Lengths become Python lists for every layout: reading them from a GPU would wait for its queue.
    return Batch(
        lengths=part.lengths,
        tokens={name: column.to(device) for name, column in part.tokens.items()},
        rows={name: column.to(device) for name, column in part.rows.items()},
        meta=part.meta,
    )


def flat_rows(rows: Batch, padding: int) -> tuple[Tensor, Tensor, list[int]]:
    """input_ids and positions, int64 (T,), and the lengths, with ``padding`` more tokens.

    The padding is one more row at the end, which no loss reads; attention stays within rows, so it affects no other row.
    """
    ids = rows.tokens["input_ids"]
    if not padding:
        return ids, rows.positions().to(ids.device), rows.lengths.tolist()
    positions = torch.cat([rows.positions(), torch.arange(padding)]).to(ids.device)
    return torch.cat([ids, ids.new_zeros(padding)]), positions, [*rows.lengths.tolist(), padding]


def weighted(loss: Loss, outputs: dict[str, Tensor], rows: Batch) -> tuple[Tensor, Metrics]:
    """sum(loss_weight * token_loss), a scalar, and the metrics of the loss."""
    token_loss, metrics = loss(outputs, rows)
    weight = rows.tokens["loss_weight"]
    # where(), not a product: the loss of a token without weight may be infinite, and 0 * inf is NaN.
    return torch.where(weight != 0, weight * token_loss, 0.0).sum(), metrics


class ForwardOutputs:
    """Collects the outputs of a forward without gradient; see TrainEngine.forward.

    Micro-batches must be taken from ``self.batch``, which has extra columns ``_place``: the index of each token and row in the
    batch.
    """

    def __init__(self, batch: Batch, outputs: Collection[str], head: Head, vocabulary: int) -> None:
        assert outputs and set(outputs) <= OUTPUTS[head], f"a {head} head has the outputs {OUTPUTS[head]}"
        total = batch.total_tokens
        wide = {"top_log_probs": (total, 2), "all_log_probs": (total, vocabulary)}
        self.batch = batch.with_tokens(_place=torch.arange(total)).with_rows(_place=torch.arange(len(batch)))
        self._tokens = {name: torch.zeros(wide.get(name, (total,))) for name in sorted({*outputs} - {*ROWS[head]})}
        self._rows = {name: torch.zeros(len(batch)) for name in ROWS[head]}

    def put(self, micro_batch: Batch, results: dict[str, Tensor]) -> None:
        """Store the outputs of a micro-batch at their places, as float32 on the CPU."""
        for columns, place in ((self._tokens, micro_batch.tokens["_place"]), (self._rows, micro_batch.rows["_place"])):
            for name, column in columns.items():
                # Micro-batches reorder rows: scatter by index, not by position.
                column[place.cpu()] = results[name].float().cpu()

    def batch_of_outputs(self) -> Batch:
        """Return the collected outputs as a Batch with the lengths and meta of the original."""
        return Batch(lengths=self.batch.lengths, tokens=self._tokens, rows=self._rows, meta=dict(self.batch.meta))
