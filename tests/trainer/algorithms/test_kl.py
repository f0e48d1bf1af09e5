import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from configs.schema.ppo import KLControlConfig
from tests.trainer.algorithms.plain import defaults
from trainer.algorithms.kl import KLController, apply_kl_penalty, kl_estimate, reward_with_kl
from workers.batch import Batch


@given(st.floats(-5, 5))
def test_kinds_agree_to_second_order_at_zero(x: float) -> None:
    log_p, log_q = torch.tensor([1e-3 * x], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    k2, k3 = kl_estimate("k2", log_p, log_q), kl_estimate("k3", log_p, log_q)
    torch.testing.assert_close(k2, k3, atol=abs(1e-3 * x) ** 3 + 1e-15, rtol=0)
    torch.testing.assert_close(kl_estimate("abs", log_p, log_q), kl_estimate("k1", log_p, log_q).abs())


@pytest.mark.parametrize(
    ("kl", "factor"), [(0.1, 1.0), (10.0, 1.0 + 0.2 * 50 / 1000), (0.0, 1.0 - 0.2 * 50 / 1000), (0.11, 1.0 + 0.1 * 50 / 1000)]
)
def test_adaptive_coefficient_follows_the_clipped_error(kl: float, factor: float) -> None:
    controller = KLController.start(KLControlConfig(type="adaptive", kl_coef=0.2, horizon=1000, target_kl=0.1))
    controller.update(kl, 50)
    assert controller.coefficient == pytest.approx(0.2 * factor)
    other = KLController.start(KLControlConfig(type="fixed", kl_coef=0.5, horizon=1000, target_kl=0.1))
    other.load(controller.state())
    other.update(kl, 50)
    assert other.coefficient == controller.coefficient


@pytest.mark.parametrize("kl", [float("nan"), float("inf")])
def test_non_finite_kl_leaves_the_coefficient_unchanged(kl: float) -> None:
    controller = KLController.start(KLControlConfig(type="adaptive", kl_coef=0.2, horizon=1000, target_kl=0.1))
    controller.update(kl, 50)
    assert controller.coefficient == 0.2


def test_penalty_applies_only_to_trained_tokens() -> None:
    rewards, kl = reward_with_kl(
        torch.tensor([0.0, 1.0]),
        torch.tensor([-1.0, -1.0]),
        torch.tensor([-3.0, -3.0]),
        torch.tensor([0.0, 1.0]),
        "kl",
        0.1,
        None,
    )
    assert kl.tolist() == [0.0, 2.0] and rewards.tolist() == pytest.approx([0.0, 0.8])


def test_kl_clip_bounds_the_penalty_and_not_the_reported_kl() -> None:
    log_probs, ref, mask = (
        torch.tensor([-1.0, -9.0, -3.0, -2.0]),
        torch.tensor([-6.0, -2.0, -2.5, -9.0]),
        torch.tensor([1.0, 1, 1, 0]),
    )
    rewards, kl = reward_with_kl(torch.zeros(4), log_probs, ref, mask, "kl", 0.1, 2.0)
    assert kl.tolist() == [5.0, -7.0, -0.5, 0.0] and rewards.tolist() == pytest.approx([-0.2, 0.2, 0.05, 0.0])
    unbounded, _ = reward_with_kl(torch.zeros(4), log_probs, ref, mask, "kl", 0.1, None)
    assert unbounded.tolist() == pytest.approx([-0.5, 0.7, 0.05, 0.0])


def penalised(lengths: list[int], log_ratio: torch.Tensor, mask: torch.Tensor, target: float) -> tuple[dict[str, float], float]:
    """Metrics, and the coefficient after an update of an adaptive controller that starts at 0.1."""
    control = KLControlConfig(type="adaptive", kl_coef=0.1, horizon=1000, target_kl=target)
    controller = KLController.start(control)
    tokens = {"old_log_probs": log_ratio, "ref_log_probs": torch.zeros_like(log_ratio), "response_mask": mask}
    algorithm = dataclasses.replace(defaults().algorithm, kl_penalty="kl", kl_clip=None, kl_ctrl=control)
    rewards, metrics = apply_kl_penalty(Batch(torch.tensor(lengths), tokens), torch.zeros(len(mask)), algorithm, controller)
    assert torch.equal(rewards, -0.1 * log_ratio * mask) and metrics["actor/reward_kl_penalty_coeff"] == 0.1
    return metrics, controller.coefficient


def test_adaptive_coefficient_follows_the_mean_over_responses_not_tokens() -> None:
    """Two tokens of KL 1 and 98 of KL 0: mean 0.5 over responses, 0.02 over tokens, with the target in between."""
    log_ratio = torch.cat([torch.ones(2), torch.zeros(98)])
    metrics, coefficient = penalised([2, 98], log_ratio, torch.ones(100), target=0.1)
    assert metrics["actor/reward_kl_penalty"] == 0.5 and coefficient == pytest.approx(0.1 * (1 + 0.2 * 2 / 1000))


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9)), min_size=1, max_size=9), st.integers(0, 999))
def test_logged_penalty_equals_verl(rows: list[tuple[int, int]], seed: int) -> None:
    """verl pads: masked_mean(kl, mask, axis=-1), then the mean over the batch."""
    generator = torch.Generator().manual_seed(seed)
    padded = torch.randn(len(rows), 9, generator=generator, dtype=torch.float64)
    shown = torch.tensor([[position < response for position in range(9)] for _, response in rows]).double()
    verl = ((padded * shown).sum(-1) / (shown.sum(-1) + 1e-8)).mean()
    parts = [torch.cat([torch.zeros(prompt), padded[i, :response]]) for i, (prompt, response) in enumerate(rows)]
    masks = [torch.cat([torch.zeros(prompt), torch.ones(response)]) for prompt, response in rows]
    metrics, _ = penalised([len(part) for part in parts], torch.cat(parts), torch.cat(masks).double(), target=0.1)
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(float(verl), abs=1e-7)
