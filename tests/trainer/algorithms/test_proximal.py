"""Decoupled PPO with each way to the proximal policy, against its formula token by token (AReaL, arXiv:2505.24298, eq. 5)."""

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest
import torch
from torch import Tensor

from configs.schema.ppo import PPOConfig
from tests.trainer.algorithms.parts import in_parts
from tests.trainer.algorithms.plain import defaults
from trainer.algorithms.losses.actor_loss import ActorLoss, ActorLossConfig
from trainer.algorithms.proximal import interpolation, proximal_log_probs
from trainer.ppo.loop import Loop
from trainer.ppo.update import UpdateSpec, update
from trainer.run.timing import Phases
from workers.batch import Batch
from workers.engine.micro_batch import micro_batch, weighted
from workers.metric import Metric, Metrics, join_metrics
from workers.plan import Limits, SharedRows

ProxLogp = Literal["recompute", "snapshot", "loglinear"]
V_PROX, SYNCED = 6, 4
"""Version of the weights at the start of the step, and of the engine's."""
EPOCHS, GROUPS = 2, 2
LOW, HIGH, DUAL = 0.2, 0.3, 3.0


def some_batch(seed: int) -> Batch:
    """Four groups of two responses with holes. Versions 1 to V_PROX."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 9, (8,), generator=g)
    n = int(lengths.sum())
    behavior = -0.2 - 2 * torch.rand(n, generator=g, dtype=torch.float64)
    mask = torch.rand(n, generator=g).gt(0.25).double()
    mask[lengths.cumsum(0) - lengths] = 0.0  # prompts
    mask[lengths.cumsum(0) - 1] = 1.0
    return Batch(
        lengths,
        tokens={
            "response_mask": mask,
            "rollout_log_probs": torch.where(mask.bool(), behavior, math.nan),
            "weight_version": torch.randint(1, V_PROX + 1, (n,), generator=g, dtype=torch.int32),
            "advantages": torch.randn(n, generator=g, dtype=torch.float64),
            "token": torch.arange(n),
        },
        rows={"uid": torch.arange(8) // 2, "group": torch.arange(8) // 2},
    )


@dataclass
class Policy:
    """Stands in for RemoteModel: theta has a log-prob for each token, and every optimizer step moves it.

    trained: mini-batches, with theta at that time and its gradient. fails: numbers of updates that are skipped.
    """

    loss: ActorLoss
    theta: Tensor
    snapshot: Tensor
    limits: Limits
    fails: tuple[int, ...] = ()
    trained: list[tuple[Batch, Tensor, Tensor, float]] = field(default_factory=list)

    def forward(self, batch: Batch, outputs: list[str], *, snapshot: bool = False) -> Batch:
        assert outputs == ["log_probs"]
        return Batch(batch.lengths, {"log_probs": (self.snapshot if snapshot else self.theta)[batch.tokens["token"]]})

    def train_step(
        self, mini: Batch, columns: tuple[str, ...], *, rows: tuple[str, ...] = (), units: str | None = None
    ) -> Metrics:
        theta = self.theta.clone().requires_grad_()
        sent = mini.only(tokens=["token", "response_mask", "loss_weight", *columns], rows=rows)
        shared = SharedRows(mini.lengths.tolist(), [()] * len(mini), None if units is None else mini.rows[units].tolist())
        total, metrics = 0.0, list[Metrics]()
        for cut in [part for of_rank in shared.plan(1, self.limits).rows_by_rank() for part in of_rank]:
            part = micro_batch(sent, cut, torch.device("cpu"))
            log_probs = torch.where(part.tokens["response_mask"].bool(), theta[part.tokens.pop("token")], 0.0)
            loss, found = weighted(self.loss, {"log_probs": log_probs, "sampled_entropy": torch.zeros(1)}, part)
            loss.backward()
            total += float(loss.detach())
            metrics.append(found)
        assert theta.grad is not None
        skipped = len(self.trained) in self.fails
        self.trained.append((mini, self.theta, theta.grad, total))
        if not skipped:
            g = torch.Generator().manual_seed(len(self.trained))
            self.theta = self.theta + 0.2 * torch.randn(len(theta), generator=g, dtype=torch.float64)
        return join_metrics(metrics) | {"skipped_updates": Metric.max(skipped)}


def config_of(prox_logp: ProxLogp, correction: dict[str, Any], loss_mode: str = "vanilla") -> PPOConfig:
    config = defaults()
    models, algorithm = config.actor_rollout_ref, config.algorithm
    actor = replace(
        models.actor, use_kl_loss=False, clip_ratio_low=LOW, clip_ratio_high=HIGH, clip_ratio_c=DUAL,
        policy_loss=replace(models.actor.policy_loss, loss_mode=loss_mode),
    )  # fmt: skip
    return replace(
        config,
        actor_rollout_ref=replace(models, actor=actor),
        algorithm=replace(algorithm, rollout_correction=replace(algorithm.rollout_correction, **correction)),
        async_training=replace(config.async_training, mode="async", prox_logp=prox_logp),
    )


def run_step(
    batch: Batch, config: PPOConfig, limits: Limits, fails: tuple[int, ...] = ()
) -> tuple[Policy, dict[str, float], dict[str, float]]:
    """Old log-probs, correction, loss mask and updates as Loop runs them; returns the policy and the metrics of both."""
    n = int(batch.tokens["token"].max()) + 1
    g = torch.Generator().manual_seed(99)
    snapshot = -0.2 - 2 * torch.rand(n, generator=g, dtype=torch.float64)
    theta = snapshot + 0.2 * torch.randn(n, generator=g, dtype=torch.float64)
    loss = ActorLoss(ActorLossConfig.of(config, old_log_probs_from_update=False))
    policy = Policy(loss, theta, snapshot, limits, fails)
    loop = cast(Loop, SimpleNamespace(
        config=config, trainer=SimpleNamespace(phases=Phases(), metrics={}, step=V_PROX),
        rollout=SimpleNamespace(version=SYNCED), actor=policy,
    ))  # fmt: skip
    batch |= Loop.old_log_probs(loop, batch)
    batch |= Loop.correction(loop, batch)
    batch |= Loop.loss_mask(loop, batch)
    spec = UpdateSpec(
        epochs=EPOCHS, groups=GROUPS, shuffle=True, agg_mode="token-mean", norm_length=7, columns=loss.columns, seed=3,
        prepare=loss.prepare if loss.needs_preparation else None,
        needs_trajectory=loss.config.needs_trajectory, interpolates=loss.config.interpolates,
    )  # fmt: skip
    return policy, loop.trainer.metrics, update(cast(Any, policy), batch, spec, 1, lambda mini, found: None)


def formula(
    mini: Batch, theta: Tensor, behavior: Tensor, proximal: Tensor, correction: dict[str, Any]
) -> tuple[Tensor, list[float]]:
    """Loss of a mini-batch of complete responses, written out with loops, and the weight of each trained token.

    theta, behavior, proximal: log-probs by token of the batch.
    """
    total, weights = torch.zeros((), dtype=torch.float64), list[float]()
    n = int(mini.tokens["response_mask"].sum())
    of_row = zip(*(mini.split_rows(name) for name in ("token", "response_mask", "advantages")), strict=True)
    for tokens, mask, advantages in of_row:
        trained = [i for i in range(len(tokens)) if mask[i]]
        gaps = {i: float(proximal[tokens[i]]) - float(behavior[tokens[i]]) for i in trained}
        for i in trained:
            gap = gaps[i] if correction["rollout_is"] == "token" else sum(gaps.values())
            weight = math.exp(gap)
            if "_" in correction["rollout_is_threshold"]:
                low, high = map(float, correction["rollout_is_threshold"].split("_"))
                weight = weight if low <= weight <= high else 0.0
            else:
                weight = min(weight, float(correction["rollout_is_threshold"]))
            weights.append(weight)
            advantage = float(advantages[i])
            ratio = (theta[tokens[i]] - float(proximal[tokens[i]])).exp()
            clipped = min(max(float(ratio.detach()), 1 - LOW), 1 + HIGH)
            inner = ratio * advantage
            if float(inner.detach()) > clipped * advantage:
                inner = torch.tensor(clipped * advantage, dtype=torch.float64)
            if advantage < 0 and float(inner.detach()) < DUAL * advantage:
                inner = torch.tensor(DUAL * advantage, dtype=torch.float64)
            total = total - weight * inner / n
    return total, weights


CORRECTIONS = [
    {"rollout_is": "token", "rollout_is_threshold": "2.0"},
    {"rollout_is": "token", "rollout_is_threshold": "0.6_1.8"},
    {"rollout_is": "sequence", "rollout_is_threshold": "5.0"},
]


@pytest.mark.parametrize("correction", CORRECTIONS, ids=["truncated", "masked", "sequence"])
@pytest.mark.parametrize("prox_logp", ["recompute", "snapshot", "loglinear"])
def test_decoupled_loss_and_its_gradient_are_those_of_the_formula(prox_logp: ProxLogp, correction: dict[str, Any]) -> None:
    for seed, fails in ((0, ()), (1, (1,))):
        batch = some_batch(seed)
        policy, _, metrics = run_step(batch, config_of(prox_logp, correction), Limits(max_tokens=12), fails)
        assert len(policy.trained) == EPOCHS * 2
        behavior = batch.tokens["rollout_log_probs"]
        seen, distinct = list[float](), set[bool]()
        start, applied = policy.trained[0][1], 0
        for number, (mini, theta, gradient, total) in enumerate(policy.trained):
            if prox_logp == "loglinear":
                v_theta = V_PROX + applied / 4
                proximal = start.clone()
                for token, version in enumerate(batch.tokens["weight_version"].tolist()):
                    alpha = 1.0 if v_theta == V_PROX else (V_PROX - version) / (v_theta - version)
                    proximal[token] = behavior[token] + alpha * (theta[token] - behavior[token])
            else:
                proximal = start if prox_logp == "recompute" else policy.snapshot
            leaf = theta.clone().requires_grad_()
            expected, weights = formula(mini, leaf, behavior, proximal, correction)
            expected.backward()
            assert leaf.grad is not None
            assert total == pytest.approx(float(expected.detach()), rel=1e-10)
            torch.testing.assert_close(gradient, leaf.grad, rtol=1e-10, atol=1e-14)
            distinct.add(bool((gradient == 0).any()))
            seen += weights if number not in fails else []
            applied += number not in fails
        assert metrics["skipped_updates"] == len(fails) and True in distinct
        if prox_logp == "loglinear" and not fails:
            trained = [int(mini.tokens["response_mask"].sum()) for mini, *_ in policy.trained]
            ends = [sum(trained[:i]) for i in range(5)]
            means = [sum(seen[start:end]) / (end - start) for start, end in pairwise(ends)]
            assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(sum(means) / 4, rel=1e-10)


@pytest.mark.parametrize("loss_mode", ["vanilla", "gspo", "geo_mean", "clip_cov"])
@pytest.mark.parametrize("correction", CORRECTIONS, ids=["truncated", "masked", "sequence"])
def test_interpolation_does_not_depend_on_micro_batches_or_parts(loss_mode: str, correction: dict[str, Any]) -> None:
    config, batch = config_of("loglinear", correction, loss_mode), some_batch(2)
    whole, _, metrics = run_step(batch, config, Limits(max_tokens=1000))
    for other in (batch, in_parts(batch, 4)):
        for limits in (Limits(max_rows=1), Limits(max_tokens=int(other.lengths.sum()) // 3 + 9)):
            found, _, again = run_step(other, config, limits)
            for (_, _, gradient, total), (_, _, expected, its_total) in zip(found.trained, whole.trained, strict=True):
                assert total == pytest.approx(its_total, rel=1e-10, abs=1e-14)
                torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-14)
            assert again == pytest.approx(metrics, rel=1e-9, abs=1e-12)


def test_first_update_is_exact_and_later_ones_lie_between_the_two_policies() -> None:
    correction = CORRECTIONS[0]
    batch = some_batch(3)
    exact, before, _ = run_step(batch, config_of("recompute", correction), Limits(max_tokens=1000))
    found, measured_before, in_update = run_step(batch, config_of("loglinear", correction), Limits(max_tokens=1000))
    torch.testing.assert_close(found.trained[0][2], exact.trained[0][2], rtol=1e-12, atol=0)
    assert any(not torch.allclose(a[2], b[2], rtol=1e-3) for a, b in zip(found.trained[1:], exact.trained[1:], strict=True))
    # The mismatch is measured on tokens of the present weights, before the first update: once, and not before the updates.
    assert not measured_before and "training/rollout_log_probs_diff_mean" in before
    mini, theta, _, _ = found.trained[0]
    fresh = (mini.tokens["weight_version"] == V_PROX) & mini.tokens["response_mask"].bool()
    gap = (theta[mini.tokens["token"]] - mini.tokens["rollout_log_probs"])[fresh].abs()
    assert in_update["training/rollout_log_probs_diff_mean"] == pytest.approx(float(gap.mean()))


def test_mismatch_is_measured_on_tokens_of_the_weights_of_the_old_log_probs() -> None:
    batch = some_batch(3)
    versions, behavior = batch.tokens["weight_version"], batch.tokens["rollout_log_probs"]
    for prox_logp, version in (("recompute", V_PROX), ("snapshot", SYNCED)):
        policy, metrics, _ = run_step(batch, config_of(cast(ProxLogp, prox_logp), CORRECTIONS[0]), Limits(max_tokens=1000))
        old = policy.trained[0][1] if prox_logp == "recompute" else policy.snapshot
        gap = (old - behavior)[(versions == version) & batch.tokens["response_mask"].bool()].abs()
        assert metrics["training/rollout_log_probs_diff_mean"] == pytest.approx(float(gap.mean()))


def test_alpha() -> None:
    """1 before the first update; then between 0, of tokens of the present weights, and 1, which old tokens approach."""
    staleness = torch.tensor([0, 1, 2, 50], dtype=torch.int32)
    assert interpolation(staleness, 0.0).tolist() == [1.0] * 4
    half = interpolation(staleness, 0.5)
    assert half.dtype == torch.float64 and half.tolist() == pytest.approx([0.0, 2 / 3, 0.8, 50 / 50.5])
    assert interpolation(staleness, 1.0).tolist() == pytest.approx([0.0, 1 / 2, 2 / 3, 50 / 51]), "AReaL's, at the end of a step"
    # Of prompts: their version means nothing.
    assert 0 <= float(interpolation(torch.tensor([-3]), 0.5)) <= 1


def test_interpolated_log_probs_have_no_gradient_and_are_bitwise_exact_at_both_ends() -> None:
    theta = torch.tensor([-1.3, -0.7, -2.1, -0.1], requires_grad=True)
    behavior, mask = torch.tensor([-1.1, -0.3, -1.7, math.nan]), torch.tensor([1.0, 1.0, 1.0, 0.0])
    found = proximal_log_probs(theta, behavior, torch.tensor([1.0, 0.0, 0.5, 0.5], dtype=torch.float64), mask)
    assert not found.requires_grad and found.dtype == torch.float32
    assert found[:2].tolist() == [theta[0].item(), behavior[1].item()] and found[3] == 0.0
    assert float(found[2]) == pytest.approx(-1.9)
    many, others = torch.rand(2, 1000, generator=torch.Generator().manual_seed(0)).log()
    assert torch.equal(proximal_log_probs(many, others, torch.ones(1000), torch.ones(1000)), many)
