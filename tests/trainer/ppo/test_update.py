import math
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.workers.test_batch import numbered
from trainer.algorithms.trajectories import PART
from trainer.algorithms.weights import token_weights
from trainer.cluster.oom_backoff import Budget
from trainer.ppo.loop import Loop
from trainer.ppo.update import UpdateSpec, update
from trainer.resilience.rollback import Rollbacks
from trainer.run.timing import Phases
from workers.batch import Batch
from workers.metric import Metric


class Recorder:
    """Stand-in for a remote model: records its mini-batches and skips the updates whose number is in ``skip``."""

    def __init__(self, skip: Collection[int] = ()) -> None:
        self.given: list[Batch] = []
        self.skip = skip
        self.budget = Budget("recorder")

    def train_step(self, mini_batch: Batch, columns: tuple[str, ...], **parts: Any) -> dict[str, Metric]:
        assert columns == ("advantages",)
        self.given.append(mini_batch)
        skipped = len(self.given) in self.skip
        return {"loss": Metric.sum(math.nan if skipped else float(len(self.given))), "skipped_updates": Metric.max(skipped)}


def unseen(mini_batch: Batch, metrics: dict[str, float]) -> None:
    pass


def step_batch() -> Batch:
    """Six prompts, two responses each."""
    batch = numbered([3, 4, 5, 2, 7, 3, 1, 6, 2, 2, 4, 3])
    mask = (torch.arange(batch.total_tokens) % 3 > 0).float()
    return batch.with_tokens(response_mask=mask).with_rows(uid=torch.arange(12) // 2, group=20 - torch.arange(12) // 2)


def spec(**changes: Any) -> UpdateSpec:
    plain = {
        "epochs": 2, "groups": 2, "shuffle": True, "agg_mode": "token-mean", "norm_length": 8,
        "columns": ("advantages",), "seed": 3,
    }  # fmt: skip
    return UpdateSpec(**(plain | changes))


def members(given: list[Batch]) -> list[tuple[int, ...]]:
    return [tuple(sorted(set(mini.rows["uid"].tolist()))) for mini in given]


def test_every_epoch_covers_the_batch_in_different_mini_batches() -> None:
    model = Recorder()
    metrics = update(cast(Any, model), step_batch(), spec(), step=5, watch=unseen)
    first, second = members(model.given[:3]), members(model.given[3:])
    assert len(model.given) == 6 and metrics == {"loss": pytest.approx(3.5), "skipped_updates": 0.0}
    for epoch in (first, second):
        assert sorted(uid for part in epoch for uid in part) == list(range(6))
    assert set(first) != set(second), "the second epoch has other mini-batches"
    other_step = Recorder()
    update(cast(Any, other_step), step_batch(), spec(), step=6, watch=unseen)
    assert set(members(other_step.given[:3])) != set(first)


@pytest.mark.parametrize("shuffle", [False, True])
def test_groups_with_the_same_prompt_are_in_different_mini_batches(shuffle: bool) -> None:
    model = Recorder()
    batch = step_batch().with_rows(uid=torch.tensor([4, 4, 7, 7, 4, 4, 9, 9, 9, 9, 4, 4]))
    update(cast(Any, model), batch, spec(shuffle=shuffle, groups=1), step=5, watch=unseen)
    for epoch in (model.given[:6], model.given[6:]):
        assert sorted(tuple(mini.rows["group"].tolist()) for mini in epoch) == [(group, group) for group in range(15, 21)]


@pytest.mark.parametrize("needs", [False, True])
def test_parts_of_a_trajectory_share_a_mini_batch_and_a_unit_if_the_loss_needs_it(needs: bool) -> None:
    """Single rows are sent without the columns; weights count trajectories; one of the second mini-batch is untrained."""
    given: list[dict[str, Any]] = []

    class Watched(Recorder):
        def train_step(self, mini_batch: Batch, columns: tuple[str, ...], **parts: Any) -> dict[str, Metric]:
            given.append(parts)
            return super().train_step(mini_batch, columns, **parts)

    numbers = torch.tensor([7, 7, 4, 4, 5, 6, 3, 2, 1, 1, 0, 0])
    parted = step_batch().with_rows(trajectory=numbers, part=torch.arange(12) % 2)
    asked = spec(epochs=1, shuffle=False, agg_mode="seq-mean-token-sum", needs_trajectory=needs)
    model = Watched()
    update(cast(Any, model), parted, asked, step=5, watch=unseen)
    units = "trajectory" if needs else None
    assert given == [
        {"rows": PART, "units": units}, {"rows": (), "units": None}, {"rows": PART, "units": units}
    ]  # fmt: skip
    assert sorted(n for mini in model.given for n in set(mini.rows["trajectory"].tolist())) == list(range(8))
    assert [float(mini.tokens["loss_weight"].max()) for mini in model.given] == [1 / 2, 1 / 3, 1 / 2]


def test_mini_batches_without_shuffling_are_in_order() -> None:
    model = Recorder()
    update(cast(Any, model), step_batch(), spec(shuffle=False, epochs=1), step=5, watch=unseen)
    assert members(model.given) == [(0, 1), (2, 3), (4, 5)]


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_token_weights_are_those_of_the_complete_mini_batch(mode: str) -> None:
    model = Recorder()
    update(cast(Any, model), step_batch(), spec(agg_mode=mode), step=5, watch=unseen)
    for mini in model.given:
        expected = token_weights(cast(Any, mode), mini.tokens["response_mask"], mini.lengths, 8)
        assert torch.equal(mini.tokens["loss_weight"], expected)


def test_token_weights_use_the_mask_after_prepare() -> None:
    """prepare gets new log-probs of the complete mini-batch, may narrow the mask, has a new seed each time, returns metrics."""
    draws: list[float] = []

    def prepare(mini: Batch, generator: torch.Generator) -> tuple[Batch, dict[str, float]]:
        draws.append(float(torch.rand((), generator=generator)))
        mask = mini.tokens["response_mask"] * (mini.tokens["log_probs"] > 0.5)
        return mini.with_tokens(response_mask=mask), {"prepared": 3.0}

    class Fresh(Recorder):
        def forward(self, batch: Batch, outputs: list[str]) -> Batch:
            assert outputs == ["log_probs"]
            return Batch(batch.lengths, tokens={"log_probs": (torch.arange(batch.total_tokens) % 2).float()})

    model = Fresh()
    metrics = update(cast(Any, model), step_batch(), spec(prepare=prepare), step=5, watch=unseen)
    assert metrics["prepared"] == 3.0 and len(set(draws)) == 6
    for mini in model.given:
        narrowed = mini.tokens["response_mask"]
        assert 0 < narrowed.sum() < len(narrowed) / 2
        assert torch.equal(mini.tokens["loss_weight"], token_weights("token-mean", narrowed, mini.lengths, 8))
    again: list[float] = list(draws)
    draws.clear()
    update(cast(Any, Fresh()), step_batch(), spec(prepare=prepare), step=5, watch=unseen)
    assert draws == again


def test_added_rows_have_their_own_weights_and_follow_the_mini_batch() -> None:
    def extend(mini: Batch) -> Batch:
        assert torch.equal(mini.tokens["loss_weight"], token_weights("token-mean", mini.tokens["response_mask"], mini.lengths, 8))
        return Batch.concat([mini, mini.select([0])])

    model, seen = Recorder(), list[Batch]()
    update(cast(Any, model), step_batch(), spec(extend=extend), step=5, watch=lambda mini, _: seen.append(mini))
    assert [len(mini) for mini in model.given] == [5] * 6 and seen == model.given


def test_metric_that_a_mini_batch_lacks_is_the_mean_of_the_others() -> None:
    class Sparse(Recorder):
        def train_step(self, mini_batch: Batch, columns: tuple[str, ...], **parts: Any) -> dict[str, Metric]:
            metrics = super().train_step(mini_batch, columns, **parts)
            return metrics | ({"seldom": Metric.max(7.0)} if len(self.given) == 2 else {})

    found = update(cast(Any, Sparse()), step_batch(), spec(epochs=1), step=5, watch=unseen)
    assert found == {"loss": 2.0, "seldom": 7.0, "skipped_updates": 0.0}


def test_updates_per_step_counts_optimizer_steps() -> None:
    assert spec(epochs=3, groups=2).updates_a_step(6) == 9 and spec(epochs=1, groups=6).updates_a_step(6) == 1


def test_skipped_updates_are_counted_and_excluded_from_means() -> None:
    """If all updates were skipped, the means are those of the skipped ones."""
    seen: list[tuple[Batch, dict[str, float]]] = []
    model = Recorder(skip={2})
    metrics = update(cast(Any, model), step_batch(), spec(epochs=1), step=5, watch=lambda *shown: seen.append(shown))
    assert metrics == {"loss": 2.0, "skipped_updates": 1.0}
    assert [mini for mini, _ in seen] == model.given
    assert [output["skipped_updates"] for _, output in seen] == [0.0, 1.0, 0.0] and math.isnan(seen[1][1]["loss"])
    metrics = update(cast(Any, Recorder(skip=range(9))), step_batch(), spec(epochs=1), step=5, watch=unseen)
    assert metrics["skipped_updates"] == 3.0 and math.isnan(metrics["loss"])


def test_mini_batches_differ_after_a_rollback() -> None:
    def learnt(rollbacks: int) -> list[tuple[int, ...]]:
        model, skips = Recorder(), SimpleNamespace(record=lambda *seen: None)
        trainer = SimpleNamespace(health=SimpleNamespace(skipped_updates=skips), events=None, phases=Phases())
        loop = SimpleNamespace(rollbacks=Rollbacks(rollbacks), trainer=trainer, updates={"actor": spec()})
        Loop.learn(cast(Any, loop), "actor", cast(Any, model), step_batch(), 5)
        return members(model.given)

    plain = Recorder()
    update(cast(Any, plain), step_batch(), spec(), step=5, watch=unseen)
    assert learnt(0) == members(plain.given), "no rollback leaves the order unchanged"
    assert learnt(0) != learnt(1) != learnt(2)
