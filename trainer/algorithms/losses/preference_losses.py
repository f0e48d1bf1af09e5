"""Losses on pairs of a chosen and a rejected response: Bradley-Terry of reward models, and DPO of policies."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from configs.schema.supervised import DPOLossConfig, PairLossConfig
from trainer.algorithms.segments import sum_by
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
        scores = outputs["scores"]
        chosen, rejected = rows_of_pairs(micro_batch.rows)
        differences = scores[chosen] - scores[rejected]
        losses = pair_losses(scores[chosen], scores[rejected], micro_batch.rows["margin"][chosen], self.config)
        return at_chosen_ends(losses, chosen, micro_batch), {
            "train/accuracy": Metric.seq_mean(accuracy(differences)),
            "train/score_difference": Metric.seq_mean(differences),
        }


def dpo_losses(log_ratios: Tensor, config: DPOLossConfig) -> Tensor:
    """Preference loss of each pair from log(policy / reference) of its chosen and its rejected response: (P, 2) -> (P,).

    With d their difference, sigmoid is -(1 - s) log sigmoid(beta d) - s log sigmoid(-beta d): Rafailov et al. 2023
    (arXiv 2305.18290), eq. 7, for s = 0; with s = label_smoothing, the probability that a label is wrong, Mitchell 2023
    (conservative DPO), eq. 3. ipo is (d - 1 / (2 beta))^2: Azar et al. 2023 (arXiv 2310.12036), eq. 17, where beta is tau.
    """
    difference = log_ratios[:, 0] - log_ratios[:, 1]
    if config.kind == "ipo":
        return (difference - 1 / (2 * config.beta)) ** 2
    h, smoothing = config.beta * difference, config.label_smoothing
    return -(1 - smoothing) * logsigmoid(h) - smoothing * logsigmoid(-h)


def dpo_terms(log_probs: Tensor, reference: Tensor, counts: Tensor, config: DPOLossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of each pair (P,), and what is reported of it, {name: (P,)}.

    log_probs, reference: sums over the tokens of the response, of the policy and of the reference, (P, 2): chosen, rejected.
    counts (P, 2): the numbers of these tokens. ipo takes means over tokens, so that its target does not depend on the length. The
    loss has sft_coef times the chosen response's cross-entropy per token: Pang et al. 2024 (arXiv 2404.19733), eq. 1.
    The implicit reward of a response is beta log(policy / reference): Rafailov et al. 2023, sec. 5.
    """
    counts = counts.clamp(min=1)  # truncation may leave nothing of a response
    log_ratios = (log_probs - reference) / (counts if config.kind == "ipo" else 1)
    losses = dpo_losses(log_ratios, config)
    if config.sft_coef:
        losses = losses - config.sft_coef * log_probs[:, 0] / counts[:, 0]
    chosen, rejected = (config.beta * log_ratios.detach()).unbind(1)
    return losses, {
        "accuracy": accuracy(chosen - rejected),
        "reward_chosen": chosen,
        "reward_rejected": rejected,
        "reward_margin": chosen - rejected,
    }


class DPOLoss:
    """Token loss (T,) of direct preference optimisation and metrics; the factory named by a LossSpec.

    Reads the row columns ``uid``, ``side`` and ``reference``: the reference's log-prob of the response, summed over
    response_mask. Both rows of a pair must be in the same micro-batch.
    """

    needs = frozenset({"log_probs"})

    def __init__(self, config: DPOLossConfig) -> None:
        self.config = config

    def __call__(self, outputs: dict[str, Tensor], micro_batch: Batch) -> tuple[Tensor, Metrics]:
        chosen, rejected = rows_of_pairs(micro_batch.rows)
        pairs = torch.stack([chosen, rejected], dim=1)
        log_probs, counts = response_sums(outputs["log_probs"], micro_batch)
        losses, found = dpo_terms(log_probs[pairs], micro_batch.rows["reference"][pairs], counts[pairs], self.config)
        metrics: Metrics = {f"train/{name}": Metric.seq_mean(values) for name, values in found.items()}
        return at_chosen_ends(losses, chosen, micro_batch), metrics


def response_sums(log_probs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Sum of ``log_probs`` (T,) over each row's response_mask, and the number of its tokens: float64 (B,) both."""
    mask = batch.tokens["response_mask"]
    row = batch.segment_ids().to(mask.device)
    return sum_by(torch.where(mask != 0, log_probs, 0.0), row, len(batch)), sum_by(mask, row, len(batch))


def rows_of_pairs(rows: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Indices of the chosen and of the rejected rows (P,) each, sorted by pair."""
    sides = [(rows["side"] == side).nonzero()[:, 0] for side in (CHOSEN, REJECTED)]
    chosen, rejected = (here[rows["uid"][here].argsort()] for here in sides)
    assert torch.equal(rows["uid"][chosen], rows["uid"][rejected]), "a pair is split over micro-batches"
    return chosen, rejected


def at_chosen_ends(losses: Tensor, chosen: Tensor, micro_batch: Batch) -> Tensor:
    """Token loss (T,) from the losses of pairs (P,). chosen (P,): their chosen rows.

    The engine sums weight * loss over tokens. A pair's loss stands at one token, the last of the chosen row, whose weight counts
    pairs; all other tokens have 0.
    """
    last = micro_batch.lengths.cumsum(0).to(losses.device) - 1
    return losses.new_zeros(micro_batch.total_tokens).index_put((last[chosen],), losses)
