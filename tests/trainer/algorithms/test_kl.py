import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from configs.schema.ppo import KLControlConfig
from trainer.algorithms.kl import KLController, kl_estimate, reward_with_kl


def test_k1_and_k3_are_unbiased_and_k3_is_never_negative() -> None:
    """Over every token of a small vocabulary, weighted by its probability, both give the exact KL."""
    g = torch.Generator().manual_seed(0)
    log_p, log_q = ((0.5 * torch.randn(50, generator=g, dtype=torch.float64)).log_softmax(0) for _ in range(2))
    exact = (log_p.exp() * (log_p - log_q)).sum()
    for kind in ("kl", "k1", "low_var_kl", "k3"):
        torch.testing.assert_close((log_p.exp() * kl_estimate(kind, log_p, log_q)).sum(), exact)
    assert (kl_estimate("k3", log_p, log_q) >= 0).all()


@given(st.floats(-5, 5))
def test_kinds_agree_to_second_order_at_zero(x: float) -> None:
    log_p, log_q = torch.tensor([1e-3 * x], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    k2, k3 = kl_estimate("k2", log_p, log_q), kl_estimate("k3", log_p, log_q)
    torch.testing.assert_close(k2, k3, atol=abs(1e-3 * x) ** 3 + 1e-15, rtol=0)
    torch.testing.assert_close(kl_estimate("abs", log_p, log_q), kl_estimate("k1", log_p, log_q).abs())


def test_k3_stays_finite_far_away() -> None:
    far = kl_estimate("k3", torch.tensor([-500.0, 500.0]), torch.zeros(2))
    assert far.tolist() == [10.0, 10.0]


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
def test_a_kl_that_is_not_finite_moves_nothing(kl: float) -> None:
    controller = KLController.start(KLControlConfig(type="adaptive", kl_coef=0.2, horizon=1000, target_kl=0.1))
    controller.update(kl, 50)
    assert controller.coefficient == 0.2


def test_the_penalty_is_taken_where_the_mask_is() -> None:
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


def test_a_token_counts_at_most_so_much_in_the_reward_and_all_of_it_in_what_is_told() -> None:
    log_probs, ref, mask = (
        torch.tensor([-1.0, -9.0, -3.0, -2.0]),
        torch.tensor([-6.0, -2.0, -2.5, -9.0]),
        torch.tensor([1.0, 1, 1, 0]),
    )
    rewards, kl = reward_with_kl(torch.zeros(4), log_probs, ref, mask, "kl", 0.1, 2.0)
    assert kl.tolist() == [5.0, -7.0, -0.5, 0.0] and rewards.tolist() == pytest.approx([-0.2, 0.2, 0.05, 0.0])
    unbounded, _ = reward_with_kl(torch.zeros(4), log_probs, ref, mask, "kl", 0.1, None)
    assert unbounded.tolist() == pytest.approx([-0.5, 0.7, 0.05, 0.0])
