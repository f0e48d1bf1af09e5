"""Validation of the current policy on held-out prompts."""

from __future__ import annotations

from trainer.algorithms.trajectories import Trajectories
from trainer.data.dataset import PromptDataset
from trainer.rollout.sampler import Sampler
from trainer.run.timing import Phases
from trainer.tracking.metrics import validation_metrics
from trainer.tracking.sample_dump import first_samples
from trainer.tracking.tracker import KEPT_SAMPLES, Tracker
from workers.batch import Batch
from workers.rollout.base import Sampling


class Validation:
    """Generates and scores responses to held-out prompts. first, last: metrics of the first and the latest validation."""

    def __init__(
        self, data: PromptDataset, sampler: Sampler, tracker: Tracker, *, n: int, sampling: Sampling, batch_size: int | None
    ) -> None:
        """n: responses per prompt. batch_size: prompts per generation call; None: all."""
        self.data = data
        self.sampler = sampler
        self.tracker = tracker
        self.n = n
        self.sampling = sampling
        self.batch_size = batch_size or len(data)
        self.first: dict[str, float] = {}
        self.last: dict[str, float] = {}

    def run(self, step: int) -> dict[str, float]:
        """Metrics over all held-out prompts. Failed rewards are counted and excluded from means.

        Seeds depend on step, prompt and sample alone, not on what was sampled for training. Scores of reward models with running
        moments enter without normalisation (see RewardModels.add).
        """
        parts = []
        for start in range(0, len(self.data), self.batch_size):
            prompts = [self.data[row] for row in range(start, min(start + self.batch_size, len(self.data)))]
            # Its own Phases: the time is reported as «testing», not added to the step's generation and reward phases.
            part = self.sampler.generate_and_score(prompts, self.n, self.sampling, Phases(), purpose="validation", step=step)
            # Before the next part, whose trajectories have the same numbers.
            parts.append(Trajectories.of(part).joined(part))
        batch = Batch.concat(parts)
        scored = batch.select((~batch.rows["reward_failed"]).nonzero().flatten())
        metrics = {"val/reward_failed": float(len(batch) - len(scored))}
        if len(scored):
            extras = scored.objects["reward_extra"]
            columns = {
                name: [extra.get(name) for extra in extras] for name in sorted({name for extra in extras for name in extra})
            }
            metrics |= validation_metrics(
                scored.objects["data_source"], scored.rows["uid"].tolist(), {"reward": scored.rows["score"].tolist()} | columns
            )
        self.tracker.log_samples(first_samples(batch, KEPT_SAMPLES), step)
        self.first = self.first or metrics
        self.last = metrics
        return metrics
