"""Reward models: learning from which of two answers is preferred."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from configs.schema.reward_model import PairLossConfig
from workers.batch import Batch
from workers.metric import Metric, Metrics

CHOSEN, REJECTED = 1, -1
"""``side`` of a row; that of a dummy row is 0."""


def pair_losses(chosen: Tensor, rejected: Tensor, margin: Tensor, config: PairLossConfig) -> Tensor:
    """Scores of the two answers of each pair, and by how much they should differ: (P,) each -> (P,).

    -log sigmoid(chosen - rejected - margin): Bradley & Terry 1952; Ouyang et al. 2022, eq. 1; with the margin Touvron et al. 2023
    (Llama 2), eq. 2. Added is center_rewards_coefficient * (chosen + rejected)^2 (Eisenstein et al. 2023, sec. 2), which chooses
    among scores that differ by a constant those around 0.
    """
    return config.center_rewards_coefficient * (chosen + rejected) ** 2 - logsigmoid(chosen - rejected - margin)


def accuracy(differences: Tensor) -> Tensor:
    """1 where the chosen answer has the higher score, 1/2 where both have the same: float64 (P,)."""
    return (differences.double().sign() + 1) / 2


def calibration_error(differences: Tensor, bins: int = 10) -> float:
    """Expected calibration error (Guo et al. 2017, eq. 3) of the preferences that scores predict. differences: (P,).

    A pair is predicted with confidence sigmoid(|difference|), from 1/2 to 1 in bins of equal width: what is the mean distance of
    a bin's confidence from its accuracy?
    """
    sure = differences.double().abs().sigmoid()
    bin_of = ((sure - 0.5) * 2 * bins).long().clamp(max=bins - 1)
    gaps = torch.zeros(bins, dtype=torch.float64).index_add(0, bin_of, accuracy(differences) - sure)
    return float(gaps.abs().sum() / len(differences))


class BradleyTerryLoss:
    """The factory that a LossSpec names. The loss of a pair is that of the chosen row's last token; no other token has one.

    Reads rows ``uid``, the same for both of a pair, ``side`` and ``margin``. Both of a pair are in the same micro-batch.
    """

    needs = frozenset({"scores"})

    def __init__(self, config: PairLossConfig) -> None:
        self.config = config

    def __call__(self, outputs: dict[str, Tensor], micro_batch: Batch) -> tuple[Tensor, Metrics]:
        scores, rows = outputs["scores"], micro_batch.rows
        chosen, rejected = (self._rows(rows, side) for side in (CHOSEN, REJECTED))
        assert torch.equal(rows["uid"][chosen], rows["uid"][rejected]), "a pair is torn"
        differences = scores[chosen] - scores[rejected]
        losses = pair_losses(scores[chosen], scores[rejected], rows["margin"][chosen], self.config)
        last = micro_batch.lengths.cumsum(0).to(scores.device) - 1
        token_loss = losses.new_zeros(micro_batch.total_tokens).index_put((last[chosen],), losses)
        return token_loss, {
            "train/accuracy": Metric.seq_mean(accuracy(differences)),
            "train/score_difference": Metric.seq_mean(differences),
        }

    @staticmethod
    def _rows(rows: dict[str, Tensor], side: int) -> Tensor:
        """Of this side, in the order of the pairs."""
        here = (rows["side"] == side).nonzero()[:, 0]
        return here[rows["uid"][here].argsort()]
