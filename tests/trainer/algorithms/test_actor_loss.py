from dataclasses import replace

import pytest
import torch

from tests.trainer.algorithms.plain import defaults
from trainer.algorithms.actor_loss import ActorLoss, ActorLossConfig
from workers.batch import Batch


def actor_loss(
    *, own: bool = False, correction: dict[str, object] | None = None, loss_mode: str = "vanilla", **actor: object
) -> ActorLoss:
    """The loss of the default configuration, with these changes."""
    config = defaults()
    models, algorithm = config.actor_rollout_ref, config.algorithm
    policy_loss = replace(models.actor.policy_loss, loss_mode=loss_mode)
    config = replace(
        config,
        actor_rollout_ref=replace(models, actor=replace(models.actor, policy_loss=policy_loss, **actor)),
        algorithm=replace(algorithm, rollout_correction=replace(algorithm.rollout_correction, **(correction or {}))),
    )
    return ActorLoss(ActorLossConfig.of(config, own_old_log_probs=own))


def micro_batch(**columns: torch.Tensor) -> Batch:
    n = len(next(iter(columns.values())))
    return Batch(torch.tensor([n]), tokens={"loss_weight": torch.full((n,), 1 / n), "response_mask": torch.ones(n)} | columns)


def test_on_policy_ratio_is_one_and_nothing_is_clipped() -> None:
    log_probs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    batch = micro_batch(advantages=torch.tensor([1.0, -2.0, 0.5]), rollout_log_probs=torch.tensor([-1.0, -2.0, -0.6]))
    loss, metrics = actor_loss(own=True)({"log_probs": log_probs}, batch)
    assert loss.tolist() == [-1.0, 2.0, -0.5]
    assert metrics["actor/pg_clipfrac"].value == 0.0 and metrics["actor/ppo_kl"].value == 0.0
    assert metrics["training/rollout_log_probs_diff_max"].value == pytest.approx(0.1)
    assert metrics["actor/pg_loss"].value == pytest.approx(0.5 / 3)
    given_old = actor_loss()({"log_probs": log_probs}, batch.with_tokens(old_log_probs=log_probs.detach()))
    assert torch.equal(given_old[0], loss) and "training/rollout_log_probs_diff_max" not in given_old[1]


def test_entropy_bonus_and_kl_loss_enter_with_their_coefficients() -> None:
    log_probs, entropy = torch.tensor([-1.0, -2.0]), torch.tensor([0.7, 0.9])
    batch = micro_batch(old_log_probs=log_probs, advantages=torch.zeros(2), ref_log_probs=torch.tensor([-1.5, -1.0]))
    loss_of = actor_loss(entropy_coeff=0.01, use_kl_loss=True, kl_loss_type="kl", kl_loss_coef=0.1)
    assert loss_of.needs == {"log_probs", "entropy"}
    loss, metrics = loss_of({"log_probs": log_probs, "entropy": entropy}, batch)
    torch.testing.assert_close(loss, -0.01 * entropy + 0.1 * torch.tensor([0.5, -1.0]))
    assert metrics["actor/kl_loss"].value == pytest.approx(-0.25) and metrics["actor/entropy"].value == pytest.approx(0.8)


def test_entropy_is_asked_for_only_when_somebody_wants_it() -> None:
    assert actor_loss().needs == {"log_probs"}
    assert actor_loss(calculate_entropy=True).needs == {"log_probs", "entropy"}
