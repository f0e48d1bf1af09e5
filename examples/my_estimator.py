"""Custom advantage estimator: the group median as baseline. Used by docs/how_to/algorithm.md."""

import torch

from configs.schema.ppo import AlgorithmConfig
from trainer.algorithms.advantages import AdvantageInputs, Advantages
from trainer.algorithms.segments import group_ids


def median_baseline(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """A = R - median(R of the group) for every token of a response: an outlier does not shift the baseline."""
    scores = inputs.scores()
    group, size = group_ids(inputs.uid)
    medians = torch.stack([scores[group == g].quantile(0.5) for g in range(len(size))])
    return inputs.outcome(scores - medians[group])
