"""Pair loss and metrics of reward models."""

import math

import pytest
import torch

from configs.schema.supervised import PairLossConfig
from trainer.algorithms.losses.preference_losses import (
    CHOSEN,
    REJECTED,
    BradleyTerryLoss,
    accuracy,
    calibration_error,
    pair_losses,
)
from workers.batch import Batch

PLAIN, CENTERED = PairLossConfig(center_rewards_coefficient=0.0), PairLossConfig(center_rewards_coefficient=0.1)
DTYPE = torch.float64


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_loss_equals_a_computation_by_hand() -> None:
    chosen, rejected, margin = torch.tensor([[2.0, 0.0, -1.0], [0.5, 0.0, 3.0], [0.0, 0.0, 1.0]], dtype=DTYPE)
    by_hand = [-math.log(sigmoid(1.5)), math.log(2), -math.log(sigmoid(-5.0))]
    assert pair_losses(chosen, rejected, margin, PLAIN).tolist() == pytest.approx(by_hand, rel=1e-12)
    centered = [loss + 0.1 * total**2 for loss, total in zip(by_hand, (2.5, 0.0, 2.0), strict=True)]
    assert pair_losses(chosen, rejected, margin, CENTERED).tolist() == pytest.approx(centered, rel=1e-12)


def test_loss_of_large_score_differences_is_finite() -> None:
    far = torch.tensor([-1e4, 1e4])
    assert pair_losses(far, -far, torch.zeros(2), PLAIN).tolist() == [2e4, 0.0]


def test_accuracy_counts_ties_half() -> None:
    assert accuracy(torch.tensor([0.1, -2.0, 0.0])).tolist() == [1.0, 0.0, 0.5]


def test_calibration_error_equals_a_computation_by_hand() -> None:
    """Two pairs in the bin from 0.70 to 0.75, one of them wrong; one pair in the last bin, right."""
    logit = [math.log(p / (1 - p)) for p in (0.72, 0.74, 0.98)]
    found = calibration_error(torch.tensor([logit[0], -logit[1], logit[2]], dtype=DTYPE))
    assert found == pytest.approx((abs(1 - 0.72 - 0.74) + abs(1 - 0.98)) / 3, rel=1e-9)
    apart = [math.log(p / (1 - p)) for p in (0.72, 0.78)]  # two bins: errors of opposite sign do not cancel
    assert calibration_error(torch.tensor([apart[0], -apart[1]], dtype=DTYPE)) == pytest.approx((0.28 + 0.78) / 2, rel=1e-9)
    certain = torch.full((4,), 50.0)
    assert calibration_error(certain) == pytest.approx(0.0, abs=1e-12) and calibration_error(-certain) == pytest.approx(1.0)
    assert calibration_error(torch.zeros(3)) == 0.0


def test_calibrated_scores_have_zero_calibration_error() -> None:
    draw = torch.Generator().manual_seed(0)
    size = torch.rand(200_000, generator=draw, dtype=DTYPE) * 3
    right = torch.rand(len(size), generator=draw, dtype=DTYPE) < size.sigmoid()
    differences = torch.where(right, size, -size)
    assert calibration_error(differences) < 0.005 < 0.1 < calibration_error(4 * differences)


def pairs(order: list[int]) -> Batch:
    """Three pairs, rows of 1 to 6 tokens, in this order."""
    batch = Batch(
        lengths=torch.arange(1, 7),
        tokens={"loss_weight": torch.zeros(21)},
        rows={
            "uid": torch.tensor([7, 7, 3, 3, 5, 5]),
            "side": torch.tensor([CHOSEN, REJECTED] * 3),
            "margin": torch.tensor([0.5, 0.5, 0.0, 0.0, 1.0, 1.0], dtype=DTYPE),
            "score": torch.tensor([1.0, 0.25, -1.0, 2.0, 0.0, -3.0], dtype=DTYPE),
        },
    )
    return batch.select(order)


def losses_at(batch: Batch) -> dict[tuple[int, int], float]:
    """{(pair, length of the row): loss of its last token}; all other tokens have none."""
    token_loss, _ = BradleyTerryLoss(PLAIN)({"scores": batch.rows["score"]}, batch)
    ends = batch.lengths.cumsum(0) - 1
    assert token_loss.count_nonzero() == 3 and len(token_loss) == 21
    at = zip(batch.rows["uid"].tolist(), batch.lengths.tolist(), token_loss[ends].tolist(), strict=True)
    return {(uid, length): loss for uid, length, loss in at if loss}


def test_loss_of_a_pair_is_at_the_end_of_its_chosen_row_in_any_order() -> None:
    by_hand = {(7, 1): -math.log(sigmoid(0.25)), (3, 3): -math.log(sigmoid(-3.0)), (5, 5): -math.log(sigmoid(2.0))}
    for order in ([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [3, 0, 5, 2, 1, 4]):
        assert losses_at(pairs(order)) == pytest.approx(by_hand, rel=1e-12)


def test_metrics_are_means_over_pairs() -> None:
    batch = pairs([5, 4, 3, 2, 1, 0])
    _, metrics = BradleyTerryLoss(PLAIN)({"scores": batch.rows["score"]}, batch)
    assert metrics["train/accuracy"].value == pytest.approx(2 / 3) and metrics["train/accuracy"].count == 3
    assert metrics["train/score_difference"].value == pytest.approx((0.75 - 3.0 + 3.0) / 3)


def test_pair_split_over_micro_batches_raises() -> None:
    batch = pairs([0, 3])
    with pytest.raises(AssertionError, match="split over micro-batches"):
        BradleyTerryLoss(PLAIN)({"scores": batch.rows["score"]}, batch)


def test_dummy_row_has_a_gradient_of_zero() -> None:
    """Empty micro-batches run a dummy row, so that all ranks run the same number of backward passes."""
    columns = {name: torch.zeros(1, dtype=torch.int64) for name in ("uid", "side", "margin")}
    scores = torch.ones(1, requires_grad=True)
    token_loss, _ = BradleyTerryLoss(CENTERED)({"scores": scores}, Batch(torch.tensor([2]), rows=columns))
    token_loss.sum().backward()
    assert token_loss.tolist() == [0.0, 0.0] and scores.grad is not None and scores.grad.tolist() == [0.0]
