"""What the controller sends and how it joins the answers, on workers that only look at what they get."""

from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from configs.schema.ppo import TimeoutsConfig
from tests.workers.rollout.engines import spec_of
from tests.workers.test_batch import numbered
from trainer.budget import Budget
from trainer.remote import RemoteModel, RemoteRollout, mesh_of
from workers.batch import Batch
from workers.controller.group import PhaseTimeout, WorkerError, WorkerInfo
from workers.controller.local_backend import LocalBackend
from workers.controller.resource_pool import ResourcePool
from workers.metric import Metric
from workers.plan import Limits, MicroBatches


class Mirror:
    """A host whose model answers with what it was given."""

    def __init__(self, info: WorkerInfo) -> None:
        self.rank = info.rank

    def close(self) -> None:
        """Holds nothing."""

    def build_model(self, role: str, spec: object, loss: object) -> tuple[int, bool]:
        return self.rank, True

    def build_rollout(self, role: str, spec: object, source: str) -> tuple[int, bool]:
        return self.rank, True

    def run(self, role: str, method: str, *args: Any) -> Any:
        return getattr(self, method)(*args)

    def forward(self, batch: Batch, plan: MicroBatches, outputs: list[str]) -> Batch:
        assert sorted(row for part in plan for row in part) == list(range(len(batch)))
        return Batch(batch.lengths, tokens={name: batch.tokens["input_ids"].double() / 2 for name in outputs})

    def train_step(self, batch: Batch, plan: MicroBatches) -> dict[str, Metric]:
        assert batch.tokens.keys() == {"input_ids", "response_mask", "loss_weight", "advantages"} and not batch.objects
        return {"flops": Metric.sum(10.0), "rows": Metric.sum(len(batch)), "rank": Metric.max(self.rank)}

    def stats(self) -> dict[str, float]:
        return {"prompt_tokens": 10.0 + self.rank}

    def generate(self, prompts: Batch, sampling: object) -> Batch:
        return prompts.with_rows(engine=torch.full((len(prompts),), self.rank))


@pytest.fixture
def model() -> Any:
    with LocalBackend() as backend:
        group = backend.start_group("hosts", ResourcePool((3,), "cpu", "pool"), Mirror)
        yield group


def start(group: Any) -> RemoteModel:
    limits = Limits(max_tokens=12)
    return RemoteModel(
        group,
        "actor",
        cast(Any, None),
        None,
        forward_limits=limits,
        train_limits=limits,
        budget=Budget("actor"),
        attention_cost=0.0,
    )


SIZES = [3, 9, 2, 7, 5, 5, 1, 8, 4, 4, 6, 2]


def test_forward_answers_for_every_row_in_order(model: Any) -> None:
    batch = numbered(SIZES).with_tokens(response_mask=torch.ones(sum(SIZES)))
    result = start(model).forward(batch, ["log_probs"])
    assert torch.equal(result.lengths, batch.lengths)
    assert torch.equal(result.tokens["log_probs"], batch.tokens["input_ids"].double() / 2)


def test_train_step_joins_over_ranks_and_keeps_flops_apart(model: Any) -> None:
    actor = start(model)
    ones = torch.ones(sum(SIZES))
    batch = numbered(SIZES).with_tokens(response_mask=ones, loss_weight=ones, advantages=ones, returns=ones)
    metrics = actor.train_step(batch, ("advantages",))
    assert metrics["rows"].value == len(SIZES) and metrics["rank"].value == 2.0 and "flops" not in metrics
    assert actor.take_flops() == 30.0 and actor.take_flops() == 0.0


def test_stats_are_added_up_over_the_engines(model: Any) -> None:
    assert RemoteRollout(model, spec_of("somewhere"), source="actor").stats() == {"prompt_tokens": 33.0}


def test_a_prompts_answers_come_from_one_engine_and_in_order(model: Any) -> None:
    rollout = RemoteRollout(model, spec_of("somewhere"), source="actor")
    prompts = numbered(SIZES).only(tokens=["input_ids"], rows=["uid"])
    answers = rollout.generate(prompts, cast(Any, None), group_size=4)
    assert as_lists_of(answers) == as_lists_of(prompts)
    assert answers.rows["engine"].tolist() == [0] * 4 + [1] * 4 + [2] * 4


def as_lists_of(batch: Batch) -> list[tuple[list[int], int]]:
    return [(ids.tolist(), uid) for ids, uid in zip(batch.split_rows("input_ids"), batch.rows["uid"].tolist(), strict=True)]


def test_the_first_rank_that_answers_speaks_for_its_share() -> None:
    mesh = mesh_of([(0, False), (0, True), (1, True), (1, False)])
    assert mesh.shard_of_rank == (0, 0, 1, 1) and mesh.answers == (1, 2)
    with pytest.raises(ValueError):
        mesh_of([(0, False), (1, True)])


class Unhappy:
    """A group on which a call ends in ``error``; the others do what they should."""

    def __init__(self, method: str, error: Exception) -> None:
        self.method, self.error = method, error
        self.limits: dict[str, float] = {}

    def register_mesh(self, name: str, mesh: object) -> None:
        """It has one engine, and needs none."""

    def call(self, *words: Any, mesh: str | None, timeout: float) -> Any:
        method = words[2] if words[0] == "run" else words[0]
        self.limits[method] = timeout
        return SimpleNamespace(result=partial(self._result, method))

    def _result(self, method: str) -> list[Any]:
        if method == self.method:
            raise self.error
        return [{}] if method == "sync_weights" else [(0, True)]


@pytest.mark.parametrize(
    ("method", "phase", "key"),
    [("build_rollout", "engine start", "start"), ("generate", "generation", "generate"), ("sync_weights", "weight sync", "sync")],
)
@pytest.mark.parametrize("kind", ["late", "dead"])
def test_an_engine_that_is_late_or_dead_is_named_with_its_phase(kind: str, method: str, phase: str, key: str) -> None:
    spec = spec_of("somewhere", name="vllm", timeouts=TimeoutsConfig(start=1.0, generate=2.0, sync=3.0))
    raised = PhaseTimeout("run", [1], 9.0, "last words") if kind == "late" else WorkerError(1, "run", "it died", "last words")
    group = Unhappy(method, raised)
    with pytest.raises((PhaseTimeout, WorkerError)) as told:
        rollout = RemoteRollout(cast(Any, group), spec, source="actor")
        rollout.sync_weights(1)
        rollout.generate(Batch(torch.tensor([1]), tokens={"input_ids": torch.tensor([5])}), cast(Any, None), group_size=1)
    assert group.limits[method] == {"start": 1.0, "generate": 2.0, "sync": 3.0}[key]
    limit = f"limited by actor_rollout_ref.rollout.timeouts.{key}, took more than 9 s: no answer from ranks [1]"
    said = (
        f"{phase} (rollout engine vllm), {limit}"
        if kind == "late"
        else f"rank 1 failed in {phase} (rollout engine vllm): it died"
    )
    assert str(told.value) == f"{said}\nlast words"
