"""Task of direct preference optimisation: a policy learns to prefer the chosen response of each pair, without a reward model.

Problem: the loss compares the policy with a reference, its own initial weights, which training overwrites. Idea: the loss reads
of the reference one number for each response, its log-prob. The same engine computes all of these before the first step, while it
still has the initial weights, so no second model is held. A resumed run computes them again before it loads the checkpoint: only
those of the steps that remain, and in the same calls as the uninterrupted run, so that they are bitwise equal. Cost: one
forward of each pair, about a third of its training. In a checkpoint they would be tied to the data files of that run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from configs.schema.common import ModelConfig, is_ever
from configs.schema.supervised import DPOConfig
from trainer.algorithms.losses.preference_losses import dpo_terms, response_sums
from trainer.cluster.remote import RemoteModel
from trainer.data.order import DataOrder
from trainer.data.preference_dataset import PreferenceDataset
from trainer.supervised.tasks import Task, chunks_of_pairs, read_pairs, weighted_by_pair
from workers.batch import Batch
from workers.controller.logs import tell
from workers.engine.base import Head, LossSpec

REPORT_SECONDS = 30.0  # interval of the lines that show progress


class DPOTask(Task):
    """Task of direct preference optimisation. A unit of the data is a pair, two adjacent rows: chosen, rejected."""

    head: Head = "lm"
    unit: str | None = "uid"
    rows: tuple[str, ...] = ("uid", "side", "reference")

    def __init__(self, config: DPOConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self.config = config
        self.model: ModelConfig = config.model
        self.loss = LossSpec("trainer.algorithms.losses.preference_losses:DPOLoss", config.loss)
        data = config.data
        self._data = read_pairs(config, data.train_files, tokenizer, None)
        self._held_out = read_pairs(config, data.val_files, tokenizer, None) if is_ever(config.trainer.test_freq) else None
        self.notices = [*self._data.notices, *(self._held_out.notices if self._held_out is not None else ())]
        # Sums of the reference's log-probs, float64 (P, 2): chosen, rejected. NaN where no remaining step needs them.
        self._reference = torch.full((len(self._data), 2), torch.nan, dtype=torch.float64)
        self._held_out_reference = torch.full((len(self._held_out or ()), 2), torch.nan, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self._data)

    def prepare(self, model: RemoteModel, order: DataOrder, steps: range) -> None:
        """Compute the reference's log-probs of the pairs of these steps and of the held-out pairs."""
        wanted = {pair for step in steps for pair in order.batch(step)}
        calls: list[tuple[PreferenceDataset, Tensor, list[int]]] = []
        known: set[int] = set()
        # What a forward computes with a pair affects its rounding. The pairs of a call depend on the earlier steps alone, not on
        # where this run starts or ends.
        for step in range(steps.stop):
            new = [pair for pair in order.batch(step) if pair not in known]
            known.update(new)
            if not wanted.isdisjoint(new):
                calls.append((self._data, self._reference, new))
        if self._held_out is not None and wanted:
            parts = chunks_of_pairs(len(self._held_out))
            calls += [(self._held_out, self._held_out_reference, list(pairs)) for pairs in parts]
        began = shown = time.monotonic()
        n, done = sum(len(pairs) for *_, pairs in calls), 0
        if n:
            tell(f"computing the reference's log-probs of {n} pairs")
        for data, reference, pairs in calls:
            reference[pairs], _ = self._sums(model, data, pairs)
            done, now = done + len(pairs), time.monotonic()
            if now - shown >= REPORT_SECONDS and done < n:
                shown = now
                tell(f"{done} of {n} pairs, about {(now - began) * (n - done) / done:.0f} s left")

    def batch(self, indices: Sequence[int]) -> Batch:
        """Global mini-batch of P pairs with the row column reference. loss_weight: a mean over the pairs."""
        batch = weighted_by_pair(rows_for_forward(self._data, indices))
        return batch.with_rows(reference=self._reference[list(indices)].flatten())

    def validate(self, model: RemoteModel, step: int) -> dict[str, float]:
        """Loss, accuracy and implicit rewards of the held-out pairs: means over the pairs."""
        assert self._held_out is not None
        parts = [self._sums(model, self._held_out, pairs) for pairs in chunks_of_pairs(len(self._held_out))]
        log_probs, counts = (torch.cat(column) for column in zip(*parts, strict=True))
        losses, found = dpo_terms(log_probs, self._held_out_reference, counts, self.config.loss)
        return {f"val/{name}": float(values.mean()) for name, values in ({"loss": losses} | found).items()}

    def _sums(self, model: RemoteModel, data: PreferenceDataset, pairs: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Log-probs of the responses, summed over tokens, and numbers of these tokens: float64 (P, 2) both."""
        batch = rows_for_forward(data, pairs)
        log_probs, counts = response_sums(model.forward(batch, ["log_probs"]).tokens["log_probs"], batch)
        return log_probs.view(-1, 2), counts.view(-1, 2)


def rows_for_forward(data: PreferenceDataset, pairs: Sequence[int]) -> Batch:
    """Rows of these pairs, so marked that an engine which can computes the prompt of a pair once."""
    batch = data.batch(pairs)
    shared = {"group": batch.rows["uid"], "prompt_length": data.prompt_lengths(pairs)}
    return batch.with_rows(**shared).with_meta({"temperature": 1.0})
