"""An advantage estimator of your own: the group's median as the baseline. docs/how_to/algorithm.md uses it."""

import torch

from configs.schema.ppo import AlgorithmConfig
from trainer.algorithms.advantages import AdvantageInputs, Advantages
from trainer.algorithms.segments import group_ids


def median_baseline(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """A = R - median(R of the group), for every token of an answer: one very good answer does not make the others bad."""
    scores = inputs.scores()
    group, size = group_ids(inputs.uid)
    medians = torch.stack([scores[group == g].quantile(0.5) for g in range(len(size))])
    return inputs.outcome(scores - medians[group])
