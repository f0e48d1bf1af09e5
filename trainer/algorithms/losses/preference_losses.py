"""Bradley-Terry loss of reward models, trained on pairs of a chosen and a rejected response."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from configs.schema.supervised import PairLossConfig
from workers.batch import Batch
from workers.metric import Metric, Metrics

CHOSEN, REJECTED = 1, -1
"""Values of the column ``side``. The dummy row that stands in for an empty micro-batch has 0."""


def pair_losses(chosen: Tensor, rejected: Tensor, margin: Tensor, config: PairLossConfig) -> Tensor:
    """Loss of each pair from the scores of its two responses and the required margin: (P,) each -> (P,).

    -log sigmoid(chosen - rejected - margin): Bradley & Terry 1952; Ouyang et al. 2022, eq. 1; with margin Touvron et al. 2023
    (Llama 2), eq. 2. Plus center_rewards_coefficient * (chosen + rejected)^2 (Eisenstein et al. 2023, sec. 2), since the loss
    is invariant to a constant offset of the scores; the term centres them at 0.
    """
    return config.center_rewards_coefficient * (chosen + rejected) ** 2 - logsigmoid(chosen - rejected - margin)


def accuracy(differences: Tensor) -> Tensor:
    """1 where the chosen response has the higher score, 1/2 for equal scores: float64 (P,)."""
    return (differences.double().sign() + 1) / 2


def calibration_error(differences: Tensor, bins: int = 10) -> float:
    """Expected calibration error (Guo et al. 2017, eq. 3) of predicted preferences. differences (P,): chosen minus rejected.

    A pair is predicted with confidence sigmoid(|difference|), between 1/2 and 1, in ``bins`` bins of equal width. The error is
    the mean over pairs of |confidence - accuracy| of their bin.
    """
    confidence = differences.double().abs().sigmoid()
    bin_ids = ((confidence - 0.5) * 2 * bins).long().clamp(max=bins - 1)
    # Sums of accuracy - confidence per bin; dividing their absolute values by P weights each bin by its share of the pairs.
    gaps = torch.zeros(bins, dtype=torch.float64).index_add(0, bin_ids, accuracy(differences) - confidence)
    return float(gaps.abs().sum() / len(differences))


class BradleyTerryLoss:
    """Token loss (T,) of pairs and metrics; the factory named by a LossSpec.

    Reads the row columns ``uid`` (equal for both rows of a pair), ``side`` and ``margin``. Both rows of a pair must be in the
    same micro-batch.
    """

    needs = frozenset({"scores"})

    def __init__(self, config: PairLossConfig) -> None:
        self.config = config

    def __call__(self, outputs: dict[str, Tensor], micro_batch: Batch) -> tuple[Tensor, Metrics]:
        scores, rows = outputs["scores"], micro_batch.rows
        chosen, rejected = (self._rows(rows, side) for side in (CHOSEN, REJECTED))
        assert torch.equal(rows["uid"][chosen], rows["uid"][rejected]), "a pair is split over micro-batches"
        differences = scores[chosen] - scores[rejected]
        losses = pair_losses(scores[chosen], scores[rejected], rows["margin"][chosen], self.config)
        # The engine sums weight * loss over tokens. The pair's loss stands at one token, the last of the chosen row, whose
        # weight counts pairs; all other tokens have 0.
        last = micro_batch.lengths.cumsum(0).to(scores.device) - 1
        token_loss = losses.new_zeros(micro_batch.total_tokens).index_put((last[chosen],), losses)
        return token_loss, {
            "train/accuracy": Metric.seq_mean(accuracy(differences)),
            "train/score_difference": Metric.seq_mean(differences),
        }

    @staticmethod
    def _rows(rows: dict[str, Tensor], side: int) -> Tensor:
        """Indices of the rows of one side, sorted by pair."""
        here = (rows["side"] == side).nonzero()[:, 0]
        return here[rows["uid"][here].argsort()]
