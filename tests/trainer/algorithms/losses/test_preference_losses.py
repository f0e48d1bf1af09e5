"""Losses and metrics of pairs: reward models, and DPO."""

import math
from typing import Literal

import pytest
import torch

from configs.schema.supervised import DPOLossConfig, PairLossConfig
from trainer.algorithms.losses.preference_losses import (
    CHOSEN,
    REJECTED,
    BradleyTerryLoss,
    DPOLoss,
    accuracy,
    calibration_error,
    dpo_losses,
    dpo_terms,
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


def dpo(
    kind: Literal["sigmoid", "ipo"] = "sigmoid", beta: float = 0.5, label_smoothing: float = 0.0, sft_coef: float = 0.0
) -> DPOLossConfig:
    return DPOLossConfig(kind=kind, beta=beta, label_smoothing=label_smoothing, sft_coef=sft_coef)


def test_dpo_losses_equal_a_computation_by_hand() -> None:
    ratios = torch.tensor([[2.0, 0.5], [0.0, 0.0], [-1.0, 3.0]], dtype=DTYPE)  # beta d = 0.75, 0, -2
    plain = [-math.log(sigmoid(h)) for h in (0.75, 0.0, -2.0)]
    assert dpo_losses(ratios, dpo()).tolist() == pytest.approx(plain, rel=1e-12)
    smoothed = [0.8 * loss - 0.2 * math.log(sigmoid(-h)) for loss, h in zip(plain, (0.75, 0.0, -2.0), strict=True)]
    assert dpo_losses(ratios, dpo(label_smoothing=0.2)).tolist() == pytest.approx(smoothed, rel=1e-12)
    assert dpo_losses(ratios, dpo("ipo", beta=0.25)).tolist() == pytest.approx([0.25, 4.0, 36.0], rel=1e-12)


def test_smoothed_loss_is_smallest_where_its_labels_are_as_often_wrong() -> None:
    """d with sigmoid(beta d) = 1 - label_smoothing; that of ipo is 1 / (2 beta)."""
    for config, best in ((dpo(label_smoothing=0.2), math.log(4) / 0.5), (dpo("ipo"), 1.0)):
        d = torch.tensor([[best, 0.0]], dtype=DTYPE, requires_grad=True)
        dpo_losses(d, config).sum().backward()
        assert d.grad is not None and d.grad.tolist() == [[pytest.approx(0.0, abs=1e-12)] * 2]


@pytest.mark.parametrize("config", [dpo(), dpo(label_smoothing=0.1, sft_coef=0.7), dpo("ipo", beta=0.1)])
def test_gradient_of_dpo_equals_finite_differences(config: DPOLossConfig) -> None:
    draw = torch.Generator().manual_seed(0)
    log_probs, reference = (-5 * torch.rand(4, 2, generator=draw, dtype=DTYPE) for _ in range(2))
    counts = torch.tensor([[3.0, 5.0], [1.0, 2.0], [4.0, 4.0], [9.0, 1.0]], dtype=DTYPE)
    check = torch.autograd.gradcheck(lambda x: dpo_terms(x, reference, counts, config)[0], log_probs.requires_grad_())
    assert check


def test_implicit_rewards_are_per_token_with_ipo_alone_and_sft_is_always() -> None:
    log_probs, reference = torch.tensor([[-3.0, -8.0]], dtype=DTYPE), torch.tensor([[-4.0, -6.0]], dtype=DTYPE)
    counts = torch.tensor([[2.0, 4.0]], dtype=DTYPE)
    losses, found = dpo_terms(log_probs, reference, counts, dpo(sft_coef=2.0))
    assert {name: value.item() for name, value in found.items()} == {
        "accuracy": 1.0, "reward_chosen": 0.5, "reward_rejected": -1.0, "reward_margin": 1.5,
    }  # fmt: skip
    assert losses.item() == pytest.approx(-math.log(sigmoid(1.5)) + 2.0 * 1.5)
    losses, found = dpo_terms(log_probs, reference, counts, dpo("ipo"))
    assert found["reward_chosen"].item() == 0.25 and found["reward_rejected"].item() == -0.25
    assert losses.item() == 0.0  # (1 / 2 + 2 / 4 - 1 / (2 * 0.5))^2


def dpo_rows(order: list[int]) -> Batch:
    """Two pairs, rows of 2 to 5 tokens in this order; the response begins at the second token."""
    mask = torch.ones(14)
    mask[[0, 2, 5, 9]] = 0.0
    rows = {
        "uid": torch.tensor([7, 7, 3, 3]),
        "side": torch.tensor([CHOSEN, REJECTED] * 2),
        "reference": torch.tensor([-1.0, -2.0, -3.0, -4.0], dtype=DTYPE),
    }
    log_probs = -torch.arange(1.0, 15.0, dtype=DTYPE)
    return Batch(torch.arange(2, 6), tokens={"log_probs": log_probs, "response_mask": mask}, rows=rows).select(order)


def test_dpo_loss_reads_the_response_of_each_row_in_any_order() -> None:
    # Sums: -2, -4 - 5, -7 - 8 - 9, -11 - 12 - 13 - 14.
    by_hand = {2: -math.log(sigmoid(0.5 * (-2 + 1 + 9 - 2))), 4: -math.log(sigmoid(0.5 * (-24 + 3 + 50 - 4)))}
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 2, 0, 3]):
        batch = dpo_rows(order)
        token_loss, metrics = DPOLoss(dpo())({"log_probs": batch.tokens["log_probs"]}, batch)
        ends = token_loss[batch.lengths.cumsum(0) - 1].tolist()
        found = {length: loss for length, loss in zip(batch.lengths.tolist(), ends, strict=True) if loss}
        assert found == pytest.approx(by_hand, rel=1e-9) and token_loss.count_nonzero() == 2
        assert metrics["train/reward_rejected"].value == pytest.approx(0.5 * (-7 - 46) / 2)
        assert metrics["train/accuracy"].value == 1.0 and metrics["train/accuracy"].count == 2
    with pytest.raises(AssertionError, match="split over micro-batches"):
        batch = dpo_rows([0, 3])
        DPOLoss(dpo())({"log_probs": batch.tokens["log_probs"]}, batch)


def test_dummy_row_of_dpo_has_a_gradient_of_zero() -> None:
    log_probs = torch.zeros(2, requires_grad=True)
    rows = {name: torch.zeros(1, dtype=torch.int64) for name in ("uid", "side", "reference")}
    token_loss, _ = DPOLoss(dpo("ipo", sft_coef=1.0))(
        {"log_probs": log_probs}, Batch(torch.tensor([2]), tokens={"response_mask": torch.zeros(2)}, rows=rows)
    )
    token_loss.sum().backward()
    assert token_loss.tolist() == [0.0, 0.0] and log_probs.grad is not None and log_probs.grad.tolist() == [0.0, 0.0]
