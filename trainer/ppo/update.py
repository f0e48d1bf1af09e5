"""One step's updates of a model: epochs, mini-batches, weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from configs.schema.common import AggMode
from trainer.algorithms.weights import token_weights
from trainer.cluster.remote import RemoteModel
from workers.batch import Batch
from workers.metric import plain_numbers
from workers.plan import mini_batches
from workers.seeding import seed_of

Prepare = Callable[[Batch, torch.Generator], tuple[Batch, dict[str, float]]]
"""A mini-batch with fresh log_probs to the same with what the loss wants to know of the whole of it, and metrics."""
Watch = Callable[[Batch, dict[str, float]], None]
"""Is shown each mini-batch as it was trained on, and the metrics of its update."""


@dataclass(frozen=True, slots=True)
class UpdateSpec:
    """groups: prompt groups a mini-batch. columns: what the loss reads. norm_length: of seq-mean-token-sum-norm.
    prepare: None for a loss that sees no further than its micro-batch. extend: a mini-batch with its weights to the same and
    other rows with theirs; None: no others.
    """

    epochs: int
    groups: int
    shuffle: bool
    agg_mode: AggMode
    norm_length: int
    columns: tuple[str, ...]
    seed: int
    prepare: Prepare | None = None
    extend: Callable[[Batch], Batch] | None = None

    def updates_a_step(self, prompts: int) -> int:
        """Optimizer steps in a training step of so many prompts."""
        return self.epochs * -(-prompts // self.groups)


def update(model: RemoteModel, batch: Batch, spec: UpdateSpec, step: int, watch: Watch) -> dict[str, float]:
    """``epochs`` passes over the step's batch, one optimizer step a mini-batch.

    Metrics: their means over the mini-batches that have them, without those whose update was skipped unless all were; one of
    which nothing is trained has no extremes or quantiles. skipped_updates: how many were.
    """
    history: list[dict[str, float]] = []
    uids = batch.rows["uid"].tolist()
    for epoch in range(spec.epochs):
        seed = seed_of(spec.seed, "mini_batch", step, epoch) if spec.shuffle else None
        for index, rows in enumerate(mini_batches(uids, spec.groups, seed=seed)):
            mini, told = batch if len(rows) == len(batch) else batch.select(rows), dict[str, float]()
            if spec.prepare is not None:
                generator = torch.Generator().manual_seed(seed_of(spec.seed, "prepare", step, epoch, index))
                mini, told = spec.prepare(mini | model.forward(mini, ["log_probs"]), generator)
            weights = token_weights(spec.agg_mode, mini.tokens["response_mask"], mini.lengths, spec.norm_length)
            mini = mini.with_tokens(loss_weight=weights)
            mini = mini if spec.extend is None else spec.extend(mini)
            history.append(plain_numbers(model.train_step(mini, spec.columns)) | told)
            watch(mini, history[-1])
    applied = [metrics for metrics in history if not metrics["skipped_updates"]]
    return _means(applied or history) | {"skipped_updates": float(len(history) - len(applied))}


def _means(history: Sequence[dict[str, float]]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for metrics in history:
        for name, value in metrics.items():
            values.setdefault(name, []).append(value)
    return {name: sum(column) / len(column) for name, column in values.items()}
