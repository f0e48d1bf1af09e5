"""The rollout role: prompts in, answers out, and weights from the model beside it."""

from __future__ import annotations

from dataclasses import replace

import torch

from workers.batch import Batch
from workers.metric import Metrics
from workers.residency import Residency
from workers.roles.model import ModelRole
from workers.rollout.base import Completion, Request, Rollout, Sampling
from workers.rollout.weight_sync import WeightSync


class RolloutRole:
    def __init__(self, rollout: Rollout, source: ModelRole, residency: Residency, sync: WeightSync) -> None:
        """source: the role whose weights this engine generates with. sync: from it to the engine."""
        self.rollout = rollout
        self.source = source
        self.residency = residency
        self.sync = sync

    def sync_weights(self, version: int) -> Metrics:
        """Bring the engine's weights up to the source's, and let the source leave the device. Collective.

        Metrics: what of the engine's weights was verified. Raises WeightMismatch.
        """
        self.residency.share_weights_of(None)
        self.residency.enter("sync", self.source.name)
        shared, metrics = self.sync(version)
        if shared:
            self.residency.share_weights_of(self.source.name)
        return metrics

    def generate(self, prompts: Batch, sampling: Sampling) -> Batch:
        """prompts: B rows of input_ids, rows["seed"], rows["greedy"] (whatever the sampling). Returns B rows in the same order:
        the answers alone.

        tokens: input_ids, rollout_log_probs (T,); rows: finished (1: stopped by itself, 0: cut), weight_version.
        """
        self.residency.enter("generate")
        greedy = replace(sampling, temperature=0.0)
        columns = zip(
            prompts.split_rows("input_ids"), prompts.rows["seed"].tolist(), prompts.rows["greedy"].tolist(), strict=True
        )
        requests = [
            Request(id=i, prompt_ids=tuple(ids.tolist()), sampling=greedy if is_greedy else sampling, seed=seed)
            for i, (ids, seed, is_greedy) in enumerate(columns)
        ]
        return answers(self.rollout.generate(requests))


def answers(completions: list[Completion]) -> Batch:
    """Completions as a flat batch."""
    return Batch(
        lengths=torch.tensor([len(completion.token_ids) for completion in completions], dtype=torch.int64),
        tokens={
            "input_ids": torch.tensor([token for c in completions for token in c.token_ids], dtype=torch.int64),
            "rollout_log_probs": torch.tensor([value for c in completions for value in c.log_probs], dtype=torch.float32),
        },
        rows={
            "finished": torch.tensor([c.finish_reason == "stop" for c in completions], dtype=torch.int64),
            "weight_version": torch.tensor([c.weight_version for c in completions], dtype=torch.int64),
        },
    )
