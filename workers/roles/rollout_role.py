"""The rollout role: prompts in, answers out, and weights from a model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from workers.batch import Batch
from workers.metric import Metric, Metrics
from workers.roles.memory_scheduler import GCTime, Residency
from workers.rollout.base import Completion, Request, Rollout, Sampling
from workers.rollout.sync.weight_sync import WeightSync


class RolloutRole:
    def __init__(
        self,
        rollout: Rollout,
        source: str | None,
        residency: Residency,
        sync: WeightSync,
        during: Callable[[], AbstractContextManager[None]] = nullcontext,
        gc_time: GCTime | None = None,
    ) -> None:
        """source: the role in this process whose weights the engine generates with, if it is here. sync: from it to the engine;
        all of it happens in a ``during()``. gc_time: of this process, to be reported."""
        self.rollout = rollout
        self.source = source
        self.residency = residency
        self.sync = sync
        self.during = during
        self.gc_time = gc_time

    def sync_weights(self, version: int) -> Metrics:
        """Bring the engine's weights up to the source's, and let a source that is here leave the device. Collective.

        Metrics: what of the engine's weights was verified; and, since the last sync, the slowest rank's seconds of engine_sleep,
        engine_wake, release_memory (see Residency) and gc, which are parts of the phases in which they happened. Raises
        WeightMismatch.
        """
        with self.during():
            self.residency.share_weights_of(None)
            self.residency.enter("sync", self.source)
            shared, metrics = self.sync(version)
            if shared:
                self.residency.share_weights_of(self.source)
        seconds = self.residency.take_seconds()
        if self.gc_time is not None:
            seconds["gc"], self.gc_time.seconds = self.gc_time.seconds, 0.0
        return metrics | {f"timing_s/{name}": Metric.max(spent) for name, spent in seconds.items()}

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

    def stats(self) -> dict[str, float]:
        """The engine's counters since the last call; see Rollout.stats."""
        return self.rollout.stats()


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
