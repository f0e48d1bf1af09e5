"""Optimizer steps of one model in a training step: epochs, mini-batches, token weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from configs.schema.common import AggMode
from trainer.algorithms.proximal import interpolation
from trainer.algorithms.trajectories import PART, Trajectories
from trainer.algorithms.weights import token_weights
from trainer.cluster.remote import RemoteModel
from workers.batch import Batch
from workers.metric import plain_numbers
from workers.plan import mini_batches
from workers.seeding import seed_of

Prepare = Callable[[Batch, torch.Generator], tuple[Batch, dict[str, float]]]
"""Adds columns that need statistics of the whole mini-batch, given log_probs of the current weights; returns it with metrics."""
Watch = Callable[[Batch, dict[str, float]], None]
"""Called after each update with the mini-batch as it was trained on and the metrics of the update."""


@dataclass(frozen=True, slots=True)
class UpdateSpec:
    """Update settings of one role.

    groups: prompt groups per mini-batch. columns: token columns that the loss reads. norm_length: divisor of
    seq-mean-token-sum-norm, in tokens. prepare: None for a loss that needs no statistics of the mini-batch. extend: appends rows
    with their own loss weights to a mini-batch (auxiliary pretraining loss); None: no such rows. needs_trajectory: the loss gets
    all rows of a trajectory in one micro-batch. interpolates: mini-batches get the column prox_alpha, made of the batch's column
    staleness (proximal.py).
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
    needs_trajectory: bool = False
    interpolates: bool = False

    def updates_a_step(self, prompts: int) -> int:
        """Number of optimizer steps in a training step of ``prompts`` prompts."""
        return self.epochs * -(-prompts // self.groups)


def update(model: RemoteModel, batch: Batch, spec: UpdateSpec, step: int, watch: Watch) -> dict[str, float]:
    """Run ``epochs`` passes over the step's batch, with one optimizer step per mini-batch.

    Returns the mean of each metric over the mini-batches that report it. Mini-batches with a skipped update are excluded, unless
    all were skipped. A mini-batch without a trained token reports no means, extremes or quantiles. skipped_updates: their number.
    """
    history: list[dict[str, float]] = []
    uids, prompt_groups = batch.rows["uid"].tolist(), batch.rows["group"].tolist()
    for epoch in range(spec.epochs):
        # A function of step and epoch: a resumed run shuffles as the interrupted one would have.
        seed = seed_of(spec.seed, "mini_batch", step, epoch) if spec.shuffle else None
        cuts = mini_batches(uids, spec.groups, seed=seed, groups=prompt_groups)
        for index, rows in enumerate(cuts):
            mini, loss_metrics = batch if len(rows) == len(batch) else batch.select(rows), dict[str, float]()
            if spec.interpolates:
                # A skipped update has not moved the policy away from the proximal one.
                applied = sum(not metrics["skipped_updates"] for metrics in history)
                alpha = interpolation(mini.tokens["staleness"], applied / (spec.epochs * len(cuts)))
                mini = mini.with_tokens(prox_alpha=alpha)
            if spec.prepare is not None:
                # The forward pass runs here, not before the epochs: earlier mini-batches have already changed the weights.
                generator = torch.Generator().manual_seed(seed_of(spec.seed, "prepare", step, epoch, index))
                mini, loss_metrics = spec.prepare(mini | model.forward(mini, ["log_probs"]), generator)
            # Over the global mini-batch, before it is split: gradients of micro-batches and ranks are summed, never averaged.
            # After prepare, which may reject tokens by changing response_mask.
            trajectories = Trajectories.of(mini)
            mask = trajectories.gather(mini.tokens["response_mask"])
            weights = token_weights(spec.agg_mode, mask, trajectories.lengths, spec.norm_length)
            mini = mini.with_tokens(loss_weight=trajectories.split(weights))
            mini = mini if spec.extend is None else spec.extend(mini)
            # Parts of a trajectory are sent with their names; only some losses need them in one micro-batch.
            named = () if trajectories.are_rows else PART
            units = "trajectory" if named and spec.needs_trajectory else None
            history.append(plain_numbers(model.train_step(mini, spec.columns, rows=named, units=units)) | loss_metrics)
            watch(mini, history[-1])
    kept = [metrics for metrics in history if not metrics["skipped_updates"]]
    return _means(kept or history) | {"skipped_updates": float(len(history) - len(kept))}


def _means(history: Sequence[dict[str, float]]) -> dict[str, float]:
    """Mean of each metric over the entries that contain it."""
    values: dict[str, list[float]] = {}
    for metrics in history:
        for name, value in metrics.items():
            values.setdefault(name, []).append(value)
    return {name: sum(column) / len(column) for name, column in values.items()}
