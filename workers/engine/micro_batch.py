"""A micro-batch on the device, and the answers of all of them back in the order of the batch."""

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
    """The rows of a micro-batch in the order in which they are packed."""
    lengths = batch.lengths.tolist()
    return sorted(chosen, key=lambda row: (-lengths[row], row))


def micro_batch(batch: Batch, chosen: Sequence[int], device: torch.device) -> Batch:
    """These rows, the longest first, with columns on the device (lengths stay); no rows: one dummy row of zeros."""
    if chosen:
        part = batch.select(longest_first(batch, chosen))
    else:
        part = Batch(
            lengths=torch.tensor([2]),
            tokens={name: column.new_zeros(2, *column.shape[1:]) for name, column in batch.tokens.items()},
            rows={name: column.new_zeros(1, *column.shape[1:]) for name, column in batch.rows.items()},
            meta=batch.meta,
        )
    return Batch(
        lengths=part.lengths,
        tokens={name: column.to(device) for name, column in part.tokens.items()},
        rows={name: column.to(device) for name, column in part.rows.items()},
        meta=part.meta,
    )


def flat_rows(rows: Batch, unit: int) -> tuple[Tensor, Tensor, list[int]]:
    """input_ids and positions, int64 (T,), and lengths; one more row, which no loss sees, pads T to a multiple of ``unit``."""
    ids = rows.tokens["input_ids"]
    padding = -rows.total_tokens % unit
    if not padding:
        return ids, rows.positions().to(ids.device), rows.lengths.tolist()
    positions = torch.cat([rows.positions(), torch.arange(padding)]).to(ids.device)
    return torch.cat([ids, ids.new_zeros(padding)]), positions, [*rows.lengths.tolist(), padding]


def weighted(loss: Loss, outputs: dict[str, Tensor], rows: Batch) -> tuple[Tensor, Metrics]:
    """sum(loss_weight * token_loss), a scalar, and the loss's metrics."""
    token_loss, metrics = loss(outputs, rows)
    weight = rows.tokens["loss_weight"]
    # A token without weight takes no part, whatever its loss: 0 * inf is not 0.
    return torch.where(weight != 0, weight * token_loss, 0.0).sum(), metrics


class Answers:
    """What a forward without gradient answers; see TrainEngine.forward. Micro-batches are taken from ``batch``."""

    def __init__(self, batch: Batch, outputs: Collection[str], head: Head, vocabulary: int) -> None:
        assert outputs and set(outputs) <= OUTPUTS[head], f"a {head} head answers {OUTPUTS[head]}"
        total = batch.total_tokens
        wide = {"top_log_probs": (total, 2), "all_log_probs": (total, vocabulary)}
        self.batch = batch.with_tokens(_place=torch.arange(total)).with_rows(_place=torch.arange(len(batch)))
        self._tokens = {name: torch.zeros(wide.get(name, (total,))) for name in sorted({*outputs} - {*ROWS[head]})}
        self._rows = {name: torch.zeros(len(batch)) for name in ROWS[head]}

    def put(self, micro_batch: Batch, results: dict[str, Tensor]) -> None:
        for columns, place in ((self._tokens, micro_batch.tokens["_place"]), (self._rows, micro_batch.rows["_place"])):
            for name, column in columns.items():
                column[place.cpu()] = results[name].float().cpu()

    def whole(self) -> Batch:
        return Batch(lengths=self.batch.lengths, tokens=self._tokens, rows=self._rows, meta=dict(self.batch.meta))
