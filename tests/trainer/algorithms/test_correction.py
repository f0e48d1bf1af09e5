import math
import statistics
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from configs.schema.ppo import RolloutCorrectionConfig
from tests.trainer.algorithms.plain import defaults
from trainer.algorithms.correction import mismatch, rollout_correction
from workers.metric import plain_numbers

MASK = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0])
LENGTHS = torch.tensor([3, 4, 1])  # the last row has no trained token
OLD = torch.tensor([9.9, -1.0, -2.0, 9.9, -0.5, -3.0, -1.0, 9.9], dtype=torch.float64)
RATIO = torch.tensor([1.0, 1.5, 0.5, 1.0, 3.0, 1.0, 0.2, 1.0], dtype=torch.float64)
ROLLOUT = OLD - RATIO.log()


def config(**changes: Any) -> RolloutCorrectionConfig:
    return replace(defaults().algorithm.rollout_correction, **changes)


def correct(**changes: Any) -> Any:
    return rollout_correction(OLD, ROLLOUT, MASK, LENGTHS, config(**changes))


def test_token_weights_are_the_ratio_truncated_above() -> None:
    found = correct(rollout_is="token", rollout_is_threshold="2.0")
    assert found.weights.tolist() == pytest.approx([0, 1.5, 0.5, 0, 2.0, 1.0, 0.2, 0])
    assert torch.equal(found.mask, MASK)
    assert found.metrics["rollout_corr/rollout_is_ratio_fraction_high"] == pytest.approx(1 / 5)


def test_weights_outside_two_bounds_are_zero() -> None:
    found = correct(rollout_is="token", rollout_is_threshold="0.4_2.0")
    assert found.weights.tolist() == pytest.approx([0, 1.5, 0.5, 0, 0, 1.0, 0, 0])
    assert found.metrics["rollout_corr/rollout_is_oob_ratio"] == pytest.approx(2 / 5)


def test_all_zero_weights_have_effective_sample_size_zero() -> None:
    found = correct(rollout_is="token", rollout_is_threshold="5.0_6.0")
    assert not found.weights.any() and found.metrics["rollout_corr/rollout_is_eff_sample_size"] == 0.0


def test_batch_without_trained_tokens_has_zero_weights_and_no_metrics() -> None:
    rules = config(rollout_is="token", rollout_rs="seq_max_k2", rollout_rs_threshold="1", rollout_token_veto_threshold=0.1)
    found = rollout_correction(OLD, ROLLOUT, torch.zeros_like(MASK), LENGTHS, rules)
    assert not found.weights.any() and not found.mask.any() and found.metrics == {}


def test_sequence_weights_are_products() -> None:
    found = correct(rollout_is="sequence", rollout_is_threshold="10")
    assert found.weights.tolist() == pytest.approx([0, 0.75, 0.75, 0, 0.6, 0.6, 0.6, 0])


def test_normalised_weights_have_mean_one() -> None:
    found = correct(rollout_is="token", rollout_is_batch_normalize=True)
    assert float(found.weights.sum() / MASK.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("rule", "bound", "kept"),
    [
        ("token_k1", "0.4_2.5", [0, 1, 1, 0, 0, 1, 0, 0]),
        ("token_k3", "0.5", [0, 1, 1, 0, 0, 1, 0, 0]),
        ("seq_sum_k1", "0.7_1.5", [0, 1, 1, 0, 0, 0, 0, 0]),  # 1 / (1.5 * 0.5) = 1.33, 1 / (3 * 0.2) = 1.67
        ("seq_mean_k1", "0.7_1.16", [0, 1, 1, 0, 0, 0, 0, 0]),  # geometric: 1.155, 1.186
        ("seq_max_k2", "0.3", [0, 1, 1, 0, 0, 0, 0, 0]),
        ("token_k1,seq_max_k3", "0.4_2.5,5.0", [0, 1, 1, 0, 0, 1, 0, 0]),
    ],
)
def test_rejection_rules_mask_tokens_outside_the_bounds(rule: str, bound: str, kept: list[int]) -> None:
    found = correct(rollout_rs=rule, rollout_rs_threshold=bound)
    assert found.mask.tolist() == kept and found.weights is None
    assert found.metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 - sum(kept) / 5)


@pytest.mark.parametrize("rule", ["token_k1", "seq_sum_k1", "seq_mean_k1"])
def test_bounds_of_k1_are_on_rollout_over_policy_probability_as_in_verl(rule: str) -> None:
    """One token sampled with four times the policy's probability and one with a quarter of it."""
    old, rollout = torch.tensor([0.1, 0.4]).log(), torch.tensor([0.4, 0.1]).log()

    def kept(bounds: str) -> list[float]:
        rules = config(rollout_rs=rule, rollout_rs_threshold=bounds)
        return rollout_correction(old, rollout, torch.ones(2), torch.tensor([1, 1]), rules).mask.tolist()

    assert kept("0.5_5.0") == [1.0, 0.0] and kept("0.2_2.0") == [0.0, 1.0] and kept("5.0") == [1.0, 1.0]
    weights = rollout_correction(
        old, rollout, torch.ones(2), torch.tensor([1, 1]), config(rollout_is="token", rollout_is_threshold="0.5_5.0")
    ).weights
    assert weights is not None and weights.tolist() == pytest.approx([0.0, 4.0]), "the bounds of weights are on the inverse"


def test_veto_rejects_the_complete_response() -> None:
    found = correct(rollout_token_veto_threshold=0.3)
    assert found.mask.tolist() == [0, 1, 1, 0, 0, 0, 0, 0]
    assert correct(rollout_token_veto_threshold=0.1).mask.tolist() == MASK.tolist()


def test_divergence_metrics_have_the_expected_signs() -> None:
    found = correct(rollout_is="token")
    x = [math.log(ratio) for ratio in (1.5, 0.5, 3.0, 1.0, 0.2)]
    assert found.metrics["rollout_corr/kl"] == pytest.approx(-statistics.fmean(x))
    assert found.metrics["rollout_corr/k3_kl"] == pytest.approx(statistics.fmean(math.exp(v) - 1 - v for v in x))


def test_mismatch_is_measured_on_trained_tokens_only() -> None:
    metrics = plain_numbers(mismatch(OLD, torch.where(MASK.bool(), ROLLOUT, 1e6), MASK))
    training, rollout = OLD[MASK.bool()], ROLLOUT[MASK.bool()]
    probs, gap = (training.exp() - rollout.exp()).abs(), (training - rollout).abs()
    ratios = RATIO[MASK.bool()].numpy()
    assert metrics == pytest.approx(
        {
            "training/rollout_probs_diff_mean": float(probs.mean()),
            "training/rollout_probs_diff_max": float(probs.max()),
            "training/rollout_log_probs_diff_mean": float(gap.mean()),
            "training/rollout_log_probs_diff_max": float(gap.max()),
            "training/rollout_kl_k1": float((rollout - training).mean()),
            "training/rollout_kl_k3": float(((training - rollout).exp() - 1 - (training - rollout)).mean()),
            "training/rollout_ratio_p01": float(np.percentile(ratios, 1)),
            "training/rollout_ratio_p50": 1.0,
            "training/rollout_ratio_p99": float(np.percentile(ratios, 99)),
        },
        rel=1e-5,
    )
