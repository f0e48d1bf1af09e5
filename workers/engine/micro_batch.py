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
PREDICTED, SAMPLED = "predicted", "sampled"
"""Entries of a micro-batch's meta. Predicted: int64 (N,), tokens whose log-probs are wanted, on the device. Sampled: int64 (M,),
those of the N whose entropy is wanted; there if the batch has an entropy_mask."""


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
    # Reading anything from a GPU waits for its queue: what decides about shapes is computed here, and lengths stay.
    meta = dict(part.meta)
    if (mask := part.tokens.get("response_mask")) is not None:
        # The first token of a row has no predecessor whose state could predict it.
        predicted = (mask.bool() & (part.positions() > 0)).nonzero()[:, 0]
        meta[PREDICTED] = to_device(predicted, device)
        if (sampled := part.tokens.get("entropy_mask")) is not None:
            meta[SAMPLED] = to_device(sampled[predicted].nonzero()[:, 0], device)
    return Batch(
        lengths=part.lengths,
        tokens={name: to_device(column, device) for name, column in part.tokens.items()},
        rows={name: to_device(column, device) for name, column in part.rows.items()},
        meta=meta,
    )


def to_device(column: Tensor, device: torch.device) -> Tensor:
    """Copy from the CPU; to a GPU behind what it still has to do, without waiting for it."""
    return column.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else column.to(device)


def flat_rows(rows: Batch, padding: int) -> tuple[Tensor, Tensor, list[int]]:
    """input_ids and positions, int64 (T,), and the lengths, with ``padding`` more tokens.

    The padding is one more row at the end, which no loss reads; attention stays within rows, so it affects no other row.
    """
    ids = rows.tokens["input_ids"]
    if not padding:
        return ids, to_device(rows.positions(), ids.device), rows.lengths.tolist()
    positions = to_device(torch.cat([rows.positions(), torch.arange(padding)]), ids.device)
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
        self._waiting: dict[str, list[tuple[Tensor, Tensor]]] = {}
        """Places and values that are still on the device, by column: reading them would wait for the micro-batch."""

    def put(self, micro_batch: Batch, results: dict[str, Tensor]) -> None:
        """Store the outputs of a micro-batch at their places, as float32."""
        for columns, place in ((self._tokens, micro_batch.tokens["_place"]), (self._rows, micro_batch.rows["_place"])):
            for name, column in columns.items():
                # Micro-batches reorder rows: scatter by index, not by position.
                if column.dim() == 1:
                    self._waiting.setdefault(name, []).append((place, results[name].float()))
                else:  # it may be too wide for the device
                    column[place.cpu()] = results[name].float().cpu()

    def batch_of_outputs(self) -> Batch:
        """Return the collected outputs, on the CPU, as a Batch with the lengths and meta of the original."""
        for name, parts in self._waiting.items():
            place, values = (torch.cat(column).cpu() for column in zip(*parts, strict=True))
            (self._tokens if name in self._tokens else self._rows)[name][place] = values
        self._waiting.clear()
        return Batch(lengths=self.batch.lengths, tokens=self._tokens, rows=self._rows, meta=dict(self.batch.meta))
