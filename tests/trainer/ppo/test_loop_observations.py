"""Observation tokens (holes in response_mask), and trajectories of several rows.

The algorithms of a step compute as if observations were not there, and as if the parts of a trajectory were one row.
"""

from dataclasses import dataclass, field, replace
from functools import cache
from types import SimpleNamespace
from typing import Any, cast, get_args

import pytest
import torch
from torch import Tensor

from configs.schema.common import AggMode, KLKind
from configs.schema.ppo import PPOConfig
from tests.trainer.algorithms.parts import in_parts
from tests.trainer.algorithms.plain import defaults
from trainer.algorithms.advantages import ADVANTAGES
from trainer.algorithms.kl import KLController
from trainer.algorithms.losses.actor_loss import ActorLoss, ActorLossConfig
from trainer.algorithms.losses.value_losses import CriticLoss
from trainer.algorithms.policy_losses import POLICY_LOSSES
from trainer.ppo.loop import Loop
from trainer.ppo.update import UpdateSpec, update
from trainer.rollout.sampler import token_rewards
from trainer.run.timing import Phases
from trainer.tracking.metrics import data_metrics, reward_metrics
from workers.batch import Batch
from workers.engine.micro_batch import micro_batch, weighted
from workers.metric import Metric, Metrics, join_metrics
from workers.plan import Limits, SharedRows

LOG_PROBS = ("rollout_log_probs", "old_log_probs", "ref_log_probs", "log_probs")
PLAIN = {"rollout_is": None, "rollout_rs": None, "rollout_rs_threshold": None, "bypass_mode": False}
CORRECTIONS: list[dict[str, Any]] = [
    PLAIN,
    PLAIN | {"rollout_is": "token", "rollout_is_threshold": "2.0", "rollout_is_batch_normalize": True},
    PLAIN | {"rollout_is": "sequence", "rollout_rs": "seq_mean_k3,token_k1", "rollout_rs_threshold": "0.8,0.3_3.0"},
    PLAIN | {"rollout_rs": "seq_max_k2", "rollout_rs_threshold": "1.5", "rollout_token_veto_threshold": 1e-3},
]  # fmt: skip
BYPASS: list[dict[str, Any]] = [
    PLAIN | {"bypass_mode": True, "rollout_rs": "seq_sum_k3", "rollout_rs_threshold": "1.5"},
    PLAIN | {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": "0.3_4.0"},
]


def several_turns(seed: int) -> Batch:
    """Groups of two to three rows: a prompt, then sampled and observed tokens in turns.

    Some rows end with an observation, one has no sampled token. All columns that models compute are random at every token.
    """
    g = torch.Generator().manual_seed(seed)
    count = lambda low, high: int(torch.randint(low, high + 1, (1,), generator=g))  # noqa: E731
    sizes = [count(2, 3) for _ in range(3)]
    rows, prompts = [], []
    for _ in range(sum(sizes)):
        prompts.append(count(1, 3))
        turns = [[1.0] * count(1, 3) + [0.0] * count(0, 2) for _ in range(count(1, 3))]
        rows.append([0.0] * prompts[-1] + [mark for turn in turns for mark in turn])
    rows[-1] = [0.0] * prompts[-1]
    mask = torch.tensor([mark for row in rows for mark in row], dtype=torch.float64)
    real = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    old = -0.2 - 2 * torch.rand(len(mask), generator=g, dtype=torch.float64)
    near = {name: (old + 0.2 * real(len(mask))).clamp(max=-0.01) for name in LOG_PROBS}
    group = torch.repeat_interleave(torch.tensor([5, 2, 9]), torch.tensor(sizes))
    return Batch(
        torch.tensor([len(row) for row in rows]),
        tokens={
            "response_mask": mask, **near, "values": real(len(mask)), "entropy": real(len(mask)).abs(),
            "sum_pi_squared": torch.rand(len(mask), generator=g, dtype=torch.float64),
        },
        rows={
            "group": group, "uid": group, "prompt_length": torch.tensor(prompts), "reward": real(len(rows)),
            "score": real(len(rows)), "finished": torch.rand(len(rows), generator=g).gt(0.3).long(),
            "last_value": real(len(rows)), "baseline": real(len(rows)),
        },
        objects={"reward_extra": [{"right": float(x), "brief": float(y)} for x, y in real(len(rows), 2)]},
    )  # fmt: skip


def observed(batch: Batch) -> Tensor:
    """Tokens after the prompt that the policy did not sample: bool (T,)."""
    in_prompt = batch.positions() < torch.repeat_interleave(batch.rows["prompt_length"], batch.lengths)
    return ~in_prompt & ~batch.tokens["response_mask"].bool()


def with_other_observations(batch: Batch, seed: int) -> Batch:
    """Other numbers at every token outside the mask."""
    g, trained = torch.Generator().manual_seed(seed + 1), batch.tokens["response_mask"].bool()
    columns = {}
    for name, column in batch.tokens.items():
        other = 25 * torch.randn(len(column), generator=g, dtype=torch.float64)
        other = -other.abs() if name in LOG_PROBS else other.abs() if name == "entropy" else other
        columns[name] = column if name in ("response_mask", "serial") else torch.where(trained, column, other)
    return batch.with_tokens(**columns)


def without_observations(batch: Batch) -> Batch:
    """The same rows with the observation tokens deleted."""
    stays = ~observed(batch)
    lengths = torch.zeros_like(batch.lengths).index_add(0, batch.segment_ids(), stays.long())
    return Batch(lengths, {name: column[stays] for name, column in batch.tokens.items()}, batch.rows, batch.objects)


@dataclass
class Model:
    """Stands in for RemoteModel: the current log-probs, entropy and values are columns. trained: mini-batches with gradients.

    ranks, limits: of the plan; limits None: the mini-batch is one micro-batch. torn: number of micro-batches with a row of a
    trajectory that has another row elsewhere.
    """

    loss: ActorLoss | CriticLoss
    ranks: int = 1
    limits: Limits | None = None
    trained: list[Batch] = field(default_factory=list)
    torn: int = 0

    def forward(self, batch: Batch, outputs: list[str]) -> Batch:
        return Batch(batch.lengths, {name: batch.tokens[name] for name in outputs})

    def train_step(
        self, mini: Batch, columns: tuple[str, ...], *, rows: tuple[str, ...] = (), units: str | None = None
    ) -> Metrics:
        outputs = {name: mini.tokens[name].clone().requires_grad_() for name in ("log_probs", "entropy")}
        outputs |= {"sampled_entropy": mini.tokens["entropy"].clone(), "values": (mini.tokens["values"] + 0.3).requires_grad_()}
        total, all_metrics = torch.zeros((), dtype=torch.float64), []
        sent = mini.with_tokens(place=torch.arange(mini.total_tokens)).only(
            tokens=["place", "response_mask", "loss_weight", *columns], rows=rows
        )
        for part in self.micro_batches(sent, units):
            places = part.tokens.pop("place")
            part_loss, metrics = weighted(self.loss, {name: x[places] for name, x in outputs.items()}, part)
            part_loss.backward()
            total += part_loss.detach()
            all_metrics.append(metrics)
        metrics = join_metrics(all_metrics)
        of = {name: torch.zeros(0) if x.grad is None else x.grad for name, x in outputs.items()}
        self.trained.append(mini.with_tokens(**{f"{name}_gradient": x for name, x in of.items() if len(x)}))
        return metrics | {"train/loss": Metric.sum(total), "skipped_updates": Metric.sum(0)}

    def micro_batches(self, mini: Batch, units: str | None) -> list[Batch]:
        """Micro-batches as the workers get them."""
        if self.limits is None:
            return [mini]
        lengths = mini.lengths.tolist()
        shared = SharedRows(lengths, [()] * len(mini), None if units is None else mini.rows[units].tolist())
        cuts = [part for cut in shared.plan(self.ranks, self.limits).rows_by_rank() for part in cut]
        numbers = mini.rows.get("trajectory", torch.arange(len(mini))).tolist()
        self.torn += sum(bool({numbers[i] for i in cut} & {numbers[i] for i in {*range(len(mini))} - {*cut}}) for cut in cuts)
        return [micro_batch(mini, cut, torch.device("cpu")) for cut in cuts]


@dataclass
class Step:
    """What a step has computed. batch: with advantages and masks. minis: mini-batches with gradients, as they were trained."""

    batch: Batch
    minis: list[Batch]
    metrics: dict[str, float]
    torn: int

    def columns(self) -> dict[str, tuple[Tensor, Tensor]]:
        """{name: (values of a token column, the sampled tokens)} of everything that depends on the algorithms."""
        names = {"advantages", "returns", "is_weights", "kept_mask", "response_mask", "entropy_mask", "loss_weight", "chosen"}
        found = {}
        for place, part in enumerate((self.batch, *self.minis)):
            computed = [name for name in part.tokens if name in names or name.endswith("_gradient")]
            found |= {f"{name} {place}": (part.tokens[name], part.tokens["sampled_mask"]) for name in computed}
        return found


def run_step(batch: Batch, config: PPOConfig, critic_mode: AggMode, ranks: int = 1, limits: Limits | None = None) -> Step:
    """The step as Loop runs it, from scored responses to the updates: of the actor in every aggregation mode, of the critic.

    ranks, limits: see Model.
    """
    algorithm = config.algorithm
    loop = cast(Loop, SimpleNamespace(
        config=config, trainer=SimpleNamespace(phases=Phases(), metrics={}, step=0), kl=KLController.start(algorithm.kl_ctrl),
        rollout=SimpleNamespace(version=0),
    ))  # fmt: skip
    batch = batch.with_tokens(token_level_scores=token_rewards(batch, batch.rows["reward"]))
    if algorithm.rollout_correction.bypass_mode:
        batch = batch.with_tokens(old_log_probs=batch.tokens["rollout_log_probs"])
    batch |= Loop.correction(loop, batch)
    batch |= Loop.advantages(loop, batch)
    batch |= Loop.loss_mask(loop, batch)
    metrics, minis, torn = loop.trainer.metrics | data_metrics(batch, max_prompt_length=3), list[Batch](), 0
    metrics |= reward_metrics(batch, ())
    critic = CriticLoss(config.critic)
    loss = ActorLoss(ActorLossConfig.of(config, old_log_probs_from_update=False))
    for of_role, mode in [*((loss, mode) for mode in get_args(AggMode)), (critic, critic_mode)]:
        model, prepare = Model(of_role, ranks, limits), loss.prepare if of_role is loss and loss.needs_preparation else None
        columns = loss.columns if of_role is loss else ("values", "returns")
        spec = UpdateSpec(
            epochs=1, groups=2, shuffle=False, agg_mode=mode, norm_length=7, columns=columns, seed=3, prepare=prepare,
            needs_trajectory=of_role is loss and "trajectory" in loss.config.needs,
        )  # fmt: skip
        found = update(cast(Any, model), batch, spec, 1, lambda mini, found: None)
        metrics |= {f"{name} {mode}": value for name, value in found.items()}
        minis += model.trained
        torn += model.torn
    return Step(batch, minis, metrics, torn)


def config_of(estimator: str, loss_mode: str, number: int) -> PPOConfig:
    """The default configuration with ``number`` choosing among options that compute with tokens."""
    config = defaults()
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    corrections = CORRECTIONS if estimator == "optimal_token_baseline" else CORRECTIONS + BYPASS
    correction = replace(algorithm.rollout_correction, **corrections[number % len(corrections)])
    policy_loss = replace(actor.policy_loss, loss_mode=loss_mode, clip_cov_lb=-1.0, clip_cov_ratio=0.2, kl_cov_ratio=0.2)
    kl_kinds: tuple[KLKind, ...] = ("k1", "k2", "low_var_kl", "k3+")
    actor = replace(
        actor, policy_loss=policy_loss, entropy_coeff=(0.0, 0.01)[number % 2],
        use_kl_loss=number % 3 == 0, kl_loss_type=kl_kinds[number % 4],
    )  # fmt: skip
    algorithm = replace(
        algorithm, adv_estimator=estimator, gdpo_reward_keys=["right", "brief"], gamma=0.9, lam=0.8,
        rollout_correction=correction, whiten_advantages=(None, "batch", "group")[number % 3],
        truncated_answers=("keep", "mask", "bootstrap")[number % 7 % 3],
        use_kl_in_reward=number % 2 == 1 and not correction.bypass_mode, kl_clip=(None, 0.1)[number % 5 % 2],
    )  # fmt: skip
    return replace(config, algorithm=algorithm, actor_rollout_ref=replace(config.actor_rollout_ref, actor=actor))


@cache
def reference(estimator: str, loss_mode: str, number: int) -> Step:
    """The step on trajectories that are rows, each mini-batch in one piece."""
    mode = get_args(AggMode)[number % len(get_args(AggMode))]
    return run_step(several_turns(number), config_of(estimator, loss_mode, number), mode)


def by_serial(step: Step, name: str) -> Tensor:
    """Values of a column at the sampled tokens, by their index in the original batch."""
    values, sampled = step.columns()[name]
    part = [step.batch, *step.minis][int(name.rpartition(" ")[2])]
    serial = part.tokens.get("serial", torch.arange(part.total_tokens))
    return values[sampled == 1][serial[sampled == 1].argsort()]


@pytest.mark.parametrize("estimator", list(ADVANTAGES))
def test_observations_change_nothing_for_any_loss_and_aggregation(estimator: str) -> None:
    modes = get_args(AggMode)
    for number, loss_mode in enumerate(POLICY_LOSSES, start=list(ADVANTAGES).index(estimator)):
        where, config, batch = (estimator, loss_mode), config_of(estimator, loss_mode, number), several_turns(number)
        mode = modes[number % len(modes)]
        found = reference(estimator, loss_mode, number)
        assert len(found.minis) == 2 * len(modes) + 2, "two mini-batches of the actor for each mode, two of the critic"
        same = run_step(with_other_observations(batch, number), config, mode)
        shorter = run_step(without_observations(batch), config, mode)
        assert found.columns().keys() == same.columns().keys() == shorter.columns().keys()
        for name, (values, sampled) in found.columns().items():
            assert not values[sampled == 0].any(), (*where, name, "observation tokens")
            expected = values[sampled == 1]
            assert torch.equal(same.columns()[name][0][sampled == 1], expected), (*where, name)
            its_values, its_sampled = shorter.columns()[name]
            torch.testing.assert_close(its_values[its_sampled == 1], expected, rtol=1e-9, atol=1e-12, msg=str((*where, name)))
        assert same.metrics == pytest.approx(found.metrics, nan_ok=True, rel=0, abs=0), where
        assert shorter.metrics == pytest.approx(found.metrics, nan_ok=True, rel=1e-9, abs=1e-12), where
        assert found.metrics["response_length/mean"] == pytest.approx(float(batch.tokens["response_mask"].sum()) / len(batch))


@pytest.mark.parametrize("estimator", list(ADVANTAGES))
def test_parts_of_a_trajectory_are_one_row_for_any_loss_aggregation_and_cut(estimator: str) -> None:
    torn = set()
    for number, loss_mode in enumerate(POLICY_LOSSES, start=list(ADVANTAGES).index(estimator)):
        modes = get_args(AggMode)
        batch = with_other_observations(in_parts(several_turns(number), number), number)
        config = config_of(estimator, loss_mode, number)
        assert len(batch) > len(several_turns(number))
        expected = reference(estimator, loss_mode, number)
        ranks, limits = [(3, Limits(max_rows=1)), (1, Limits(max_rows=2)), (2, Limits(max_tokens=60))][number % 3]
        found = run_step(batch, config, modes[number % len(modes)], ranks, limits)
        where = (estimator, loss_mode)
        assert found.columns().keys() == expected.columns().keys()
        for name, (values, sampled) in found.columns().items():
            assert not values[sampled == 0].any(), (*where, name, "context and observation tokens")
            torch.testing.assert_close(
                by_serial(found, name), by_serial(expected, name), rtol=1e-10, atol=1e-12, msg=str((*where, name))
            )
        assert found.metrics == pytest.approx(expected.metrics, nan_ok=True, rel=1e-9, abs=1e-12), where
        if found.torn:
            torn.add(loss_mode)
    assert torn >= {"vanilla"}
