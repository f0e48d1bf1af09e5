import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from configs.schema.ppo import ActorConfig
from tests.trainer.algorithms.plain import defaults
from trainer.algorithms.losses.actor_loss import ActorLoss, ActorLossConfig, entropy_mask
from trainer.algorithms.policy_losses import PolicyLossInputs
from workers.batch import Batch
from workers.metric import Metric


def actor_loss(
    *, own: bool = False, correction: dict[str, object] | None = None, loss_mode: str = "vanilla", **actor: object
) -> ActorLoss:
    """Actor loss of the default configuration with ``changes``."""
    config = defaults()
    models, algorithm = config.actor_rollout_ref, config.algorithm
    policy_loss = replace(models.actor.policy_loss, loss_mode=loss_mode)
    config = replace(
        config,
        actor_rollout_ref=replace(models, actor=replace(models.actor, policy_loss=policy_loss, **actor)),
        algorithm=replace(algorithm, rollout_correction=replace(algorithm.rollout_correction, **(correction or {}))),
    )
    return ActorLoss(ActorLossConfig.of(config, old_log_probs_from_update=own))


def micro_batch(**columns: torch.Tensor) -> Batch:
    n = len(next(iter(columns.values())))
    plain = {"loss_weight": torch.full((n,), 1 / n), "response_mask": torch.ones(n), "entropy_mask": torch.zeros(n).bool()}
    return Batch(torch.tensor([n]), tokens=plain | columns)


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


def test_mean_over_a_response_is_refused_for_its_parts_unless_the_loss_needs_trajectories() -> None:
    """A loss that does not declare it gets the rows as they are; one that does gets a single row."""
    columns = {name: torch.linspace(-1, -2, 6) for name in ("old_log_probs", "advantages", "rollout_log_probs")}
    parts = replace(micro_batch(**columns), lengths=torch.tensor([2, 4]))
    parts = parts.with_rows(trajectory=torch.tensor([5, 5]), part=torch.tensor([1, 0]))
    seen: list[list[int]] = []

    def mine(inputs: PolicyLossInputs, config: ActorConfig) -> tuple[torch.Tensor, dict[str, Metric]]:
        seen.append(inputs.lengths.tolist())
        return inputs.row_mean(inputs.log_probs), {}

    outputs = {"log_probs": columns["advantages"] ** 3, "sampled_entropy": torch.zeros(6)}
    config = actor_loss().config
    with pytest.raises(ValueError, match=r"loss_mode: .* register it with needs=\{\"trajectory\"\}"):
        ActorLoss(replace(config, policy_loss=mine))(outputs, parts)
    loss, _ = ActorLoss(replace(config, policy_loss=mine, needs=frozenset({"trajectory"})))(outputs, parts)
    torch.testing.assert_close(loss, outputs["log_probs"].mean().expand(6))
    alone = replace(parts, rows={})
    loss, _ = ActorLoss(replace(config, policy_loss=mine))(outputs, alone)
    torch.testing.assert_close(loss[:2], outputs["log_probs"][:2].mean().expand(2))
    assert seen == [[2, 4], [6], [2, 4]]


def test_entropy_bonus_and_kl_loss_enter_with_their_coefficients() -> None:
    log_probs, entropy = torch.tensor([-1.0, -2.0]), torch.tensor([0.7, 0.9])
    batch = micro_batch(old_log_probs=log_probs, advantages=torch.zeros(2), ref_log_probs=torch.tensor([-1.5, -1.0]))
    loss_of = actor_loss(entropy_coeff=0.01, use_kl_loss=True, kl_loss_type="kl", kl_loss_coef=0.1)
    assert loss_of.needs == {"log_probs", "entropy"}
    loss, metrics = loss_of({"log_probs": log_probs, "entropy": entropy}, batch)
    torch.testing.assert_close(loss, -0.01 * entropy + 0.1 * torch.tensor([0.5, -1.0]))
    assert metrics["actor/kl_loss"].value == pytest.approx(-0.25) and metrics["actor/entropy"].value == pytest.approx(0.8)


def test_entropy_of_all_tokens_is_computed_only_when_configured() -> None:
    assert actor_loss().needs == {"log_probs", "sampled_entropy"} and "entropy_mask" in actor_loss().columns
    whole = actor_loss(calculate_entropy=True)
    assert whole.needs == {"log_probs", "entropy"} and "entropy_mask" not in whole.columns


def test_sampled_entropy_covers_trained_tokens_only_and_does_not_enter_the_loss() -> None:
    log_probs, entropy = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([0.7, 0.9, 0.2])
    batch = micro_batch(old_log_probs=log_probs, advantages=torch.ones(3), response_mask=torch.tensor([1.0, 0.0, 1.0]))
    outputs = {"log_probs": log_probs, "sampled_entropy": entropy}
    loss, metrics = actor_loss()(outputs, batch)
    assert "actor/entropy" not in metrics, "of no token there is none"
    marked = batch.with_tokens(entropy_mask=torch.tensor([True, True, False]))
    again, metrics = actor_loss()(outputs, marked)
    assert torch.equal(loss, again) and (metrics["actor/entropy"].value, metrics["actor/entropy"].count) == (
        pytest.approx(0.7),
        1,
    )


@pytest.mark.parametrize("length", [1, 7, 8, 16, 100])
def test_entropy_sample_is_spread_evenly_over_positions(length: int) -> None:
    """Also for responses of equal length with prompts between them."""
    answers = 16000 // length
    mask = torch.cat([torch.zeros(answers, 3), torch.ones(answers, length)], dim=1)
    chosen = entropy_mask(mask.flatten()).view(answers, -1)
    assert not chosen[:, :3].any() and chosen.sum() == pytest.approx(answers * length / 16, rel=0.02)
    assert chosen[:, 3:].sum(0).double().div(answers).sub(1 / 16).abs().max() < 0.02
    assert entropy_mask(torch.ones(1)).tolist() == [True] and not entropy_mask(torch.zeros(5)).any()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "-(inputs.advantages * inputs.log_probs).mean(), {}",
            "returned a loss (); return that of each token, (3,)",
        ),
        ("-inputs.advantages * inputs.log_probs", "returned a Tensor; return (loss, metrics)"),
        ("inputs.log_probs, {'actor/x': 1.0}", "returned the metric actor/x as float; return Metric.token_mean(values, mask)"),
        ("inputs.log_probs, {'actor/x': Metric.sum(1.0)}", None),
    ],
)
def test_results_of_a_users_loss_are_checked(body: str, message: str | None, tmp_path: Path) -> None:
    """A mean would be multiplied by each token's weight, and a plain number cannot be joined over micro-batches."""
    (tmp_path / "own.py").write_text(f"from workers.metric import Metric\n\ndef loss(inputs, config):\n    return {body}\n")
    mine = actor_loss(own=True, loss_mode=f"{tmp_path}/own.py:loss")
    batch = micro_batch(advantages=torch.tensor([1.0, -2.0, 0.5]), rollout_log_probs=torch.tensor([-1.0, -2.0, -0.6]))
    if message is None:
        assert mine({"log_probs": torch.tensor([-1.0, -2.0, -0.5])}, batch)[1]["actor/x"] == Metric.sum(1.0)
        return
    with pytest.raises(ValueError, match=re.escape(message)):
        mine({"log_probs": torch.tensor([-1.0, -2.0, -0.5])}, batch)
