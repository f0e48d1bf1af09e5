from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.algorithms.policy_losses import ActorLoss, vanilla
from workers.batch import Batch


def config(**changes: object) -> SimpleNamespace:
    plain = {
        "clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "clip_ratio_c": 3.0, "entropy_coeff": 0.0, "calculate_entropy": False,
        "use_kl_loss": False, "kl_loss_coef": 0.1, "kl_loss_type": "k3", "policy_loss": SimpleNamespace(loss_mode="vanilla"),
    }  # fmt: skip
    return SimpleNamespace(**(plain | changes))


def token_loss(ratio: float, advantage: float) -> tuple[float, float]:
    """Loss and its gradient in the log-prob."""
    log_prob = torch.tensor([ratio], dtype=torch.float64).log().requires_grad_()
    old, mask = torch.zeros(1, dtype=torch.float64), torch.ones(1)
    loss, _ = vanilla(log_prob, old, torch.tensor([advantage], dtype=torch.float64), mask, config())
    (gradient,) = torch.autograd.grad(loss.sum(), log_prob)
    return float(loss.detach()), float(gradient)


@given(st.floats(0.05, 20), st.floats(-3, 3).filter(lambda a: abs(a) > 1e-3))
def test_clip_says_where_the_gradient_is_zero(ratio: float, advantage: float) -> None:
    loss, gradient = token_loss(ratio, advantage)
    held = (advantage > 0 and ratio > 1.3) or (advantage < 0 and (ratio < 0.8 or ratio > 3.0))
    bound = {True: min(max(ratio, 0.0), 1.3), False: max(min(ratio, 3.0), 0.8)}[advantage > 0]
    assert loss == pytest.approx(-advantage * bound, rel=1e-9)
    assert gradient == pytest.approx(0.0 if held else -advantage * ratio, rel=1e-9)


def micro_batch(**columns: torch.Tensor) -> Batch:
    n = len(next(iter(columns.values())))
    return Batch(torch.tensor([n]), tokens={"loss_weight": torch.full((n,), 1 / n), "response_mask": torch.ones(n)} | columns)


def test_on_policy_ratio_is_one_and_nothing_is_clipped() -> None:
    log_probs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    batch = micro_batch(advantages=torch.tensor([1.0, -2.0, 0.5]), rollout_log_probs=torch.tensor([-1.0, -2.0, -0.6]))
    loss, metrics = ActorLoss(config())({"log_probs": log_probs}, batch)
    assert loss.tolist() == [-1.0, 2.0, -0.5]
    assert metrics["actor/pg_clipfrac"].value == 0.0 and metrics["actor/ppo_kl"].value == 0.0
    assert metrics["training/rollout_log_probs_diff_max"].value == pytest.approx(0.1)
    assert metrics["actor/pg_loss"].value == pytest.approx(0.5 / 3)
    given_old = ActorLoss(config())({"log_probs": log_probs}, batch.with_tokens(old_log_probs=log_probs.detach()))
    assert torch.equal(given_old[0], loss) and "training/rollout_log_probs_diff_max" not in given_old[1]


def test_entropy_bonus_and_kl_loss_enter_with_their_coefficients() -> None:
    log_probs, entropy = torch.tensor([-1.0, -2.0]), torch.tensor([0.7, 0.9])
    batch = micro_batch(old_log_probs=log_probs, advantages=torch.zeros(2), ref_log_probs=torch.tensor([-1.5, -1.0]))
    actor_loss = ActorLoss(config(entropy_coeff=0.01, use_kl_loss=True, kl_loss_type="kl"))
    assert actor_loss.needs == {"log_probs", "entropy"}
    loss, metrics = actor_loss({"log_probs": log_probs, "entropy": entropy}, batch)
    torch.testing.assert_close(loss, -0.01 * entropy + 0.1 * torch.tensor([0.5, -1.0]))
    assert metrics["actor/kl_loss"].value == pytest.approx(-0.25) and metrics["actor/entropy"].value == pytest.approx(0.8)


def test_entropy_is_asked_for_only_when_somebody_wants_it() -> None:
    assert ActorLoss(config()).needs == {"log_probs"}
    assert ActorLoss(config(calculate_entropy=True)).needs == {"log_probs", "entropy"}
