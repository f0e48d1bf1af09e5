"""Arguments that the controller sends and results that it joins, with workers that only record."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.trainer.watchdogs import PHASES, watchdog
from tests.workers.forests import batch_of, conversation
from tests.workers.rollout.engines import spec_of
from tests.workers.test_batch import numbered
from trainer.cluster.oom_backoff import Budget
from trainer.cluster.remote import RemoteModel, SaveFailed, mesh_of, work_by_rank
from trainer.cluster.watchdog import Watchdog
from trainer.rollout.remote_rollout import RemoteRollout
from workers.batch import Batch
from workers.controller.group import Limit, PhaseTimeout, WorkerError, WorkerInfo
from workers.controller.local_backend import LocalBackend
from workers.controller.resource_pool import ResourcePool
from workers.controller.rpc import Call
from workers.engine.base import Saved, SavedFile
from workers.metric import Metric
from workers.plan import Limits, MicroBatches, make_plan
from workers.prefixes import chains_by_tokens, repeated
from workers.rollout.base import Sampling


class Mirror:
    """A worker whose model returns its inputs."""

    def __init__(self, info: WorkerInfo) -> None:
        self.rank = info.rank
        self.roles = dict.fromkeys(("actor", "rollout"), self)
        self.prompts: list[Batch] = []

    def close(self) -> None:
        """Holds nothing."""

    def build_model(self, role: str, spec: object, loss: object) -> tuple[int, bool]:
        return self.rank, True

    def build_rollout(self, role: str, spec: object, source: str) -> tuple[int, bool]:
        return self.rank, True

    def offer_weights(self, role: str, receivers: int, replica: int) -> str | None:
        assert role == "actor"
        return None if self.rank else f"here, for {receivers}"

    def build_rollout_apart(self, role: str, spec: object, meeting: str) -> tuple[int, bool]:
        assert meeting == "here, for 3"
        return self.rank // 2, self.rank % 2 == 0

    def send_weights(self, replicas: list[int]) -> None:
        self.sent = True

    def sync_weights(self, version: int, keep_cache: bool = False) -> dict[str, Metric]:
        return {"version": Metric.max(version), "ranks": Metric.sum(1)}

    def has_sent(self) -> bool:
        return "sent" in vars(self)

    def forward(self, batch: Batch, plan: MicroBatches, outputs: list[str], adapter: bool, snapshot: bool) -> Batch:
        assert sorted(row for part in plan for row in part) == list(range(len(batch)))
        return Batch(batch.lengths, tokens={name: batch.tokens["input_ids"].double() / 2 for name in outputs})

    def train_step(self, batch: Batch, plan: MicroBatches) -> dict[str, Metric]:
        assert batch.tokens.keys() == {"input_ids", "response_mask", "loss_weight", "advantages"} and not batch.objects
        metrics = {"flops": Metric.sum(10.0), "gpu_memory": Metric.max(self.rank * 1e9)}
        return metrics | {"rows": Metric.sum(len(batch)), "rank": Metric.max(self.rank)}

    def save(self, path: str, background: bool) -> None:
        self.path = path

    def saved(self, patient: bool) -> Saved | str | None:
        file = SavedFile(name=f"{self.path}_{self.rank}", size=self.rank, sha256="")
        answer: Saved | str | None = Saved(files=[file], seconds=self.rank, waited_for="no room" if self.rank == 1 else None)
        if self.rank and self.path == "full":
            answer = "disk full"
        return None if self.rank == 2 and not patient else answer

    def stats(self) -> dict[str, float]:
        return {"prompt_tokens": 10.0 + self.rank}

    def advance(self, prompts: Batch | None, sampling: object, steps: int) -> Batch:
        """Completes three rows a call, the last submitted first."""
        if prompts is not None:
            self.prompts += prompts.chunk(len(prompts))
        done = [self.prompts.pop() for _ in range(min(3, len(self.prompts)))]
        answers = Batch.concat(done)
        return answers.with_rows(engine=torch.full((len(answers),), self.rank))


SAMPLING = Sampling(1.0, -1, 1.0, max_tokens=8, stop_token_ids=())
PATIENT = watchdog(Path())  # nothing is late here


@pytest.fixture
def model() -> Any:
    with LocalBackend() as backend:
        group = backend.start_group("workers", ResourcePool((3,), "cpu", "pool"), Mirror)
        yield group


def start(group: Any, watchdog: Watchdog = PATIENT, *, shares_prefixes: bool = False) -> RemoteModel:
    limits = Limits(max_tokens=12)
    return RemoteModel(
        group,
        "actor",
        cast(Any, SimpleNamespace(shares_prefixes=shares_prefixes)),
        None,
        forward_limits=limits,
        train_limits=limits,
        budget=Budget("actor"),
        attention_cost=0.0,
        watchdog=watchdog,
    )


SIZES = [3, 9, 2, 7, 5, 5, 1, 8, 4, 4, 6, 2]


def test_forward_returns_every_row_in_order(model: Any) -> None:
    batch = numbered(SIZES).with_tokens(response_mask=torch.ones(sum(SIZES)))
    result = start(model).forward(batch, ["log_probs"])
    assert torch.equal(result.lengths, batch.lengths)
    assert torch.equal(result.tokens["log_probs"], batch.tokens["input_ids"].double() / 2)


def test_save_ends_after_all_ranks_and_fails_if_one_rank_failed(model: Any) -> None:
    actor = start(model)
    actor.save("place", background=True)
    assert actor.saved(patient=False) is None, "one rank is still writing"
    written = actor.saved()
    assert written is not None and (written.seconds, written.waited_for, written.bytes) == (2, "no room", 3)
    assert [(file.name, file.size) for file in written.files] == [(f"place_{rank}", rank) for rank in range(3)]
    actor.save("full")
    assert actor.saved(patient=False) is None, "a rank that failed does not end the wait for one that is still writing"
    with pytest.raises(SaveFailed, match=r"^disk full$"):
        actor.saved()


def test_train_step_joins_metrics_of_ranks_and_returns_flops_and_memory_separately(model: Any) -> None:
    actor = start(model)
    ones = torch.ones(sum(SIZES))
    batch = numbered(SIZES).with_tokens(response_mask=ones, loss_weight=ones, advantages=ones, returns=ones)
    metrics = actor.train_step(batch, ("advantages",))
    assert metrics["rows"].value == len(SIZES) and metrics["rank"].value == 2.0 and not {"flops", "gpu_memory"} & metrics.keys()
    assert actor.take_flops() == 30.0 and actor.take_flops() == 0.0
    assert actor.take_gpu_memory() == 2e9 and actor.take_gpu_memory() == 0.0, "of the fullest GPU"


class Paired(Mirror):
    """Records the rows of its micro-batches."""

    def train_step(self, batch: Batch, plan: MicroBatches) -> dict[str, Metric]:
        assert batch.rows.keys() == {"side"} and batch.tokens.keys() == {"input_ids", "response_mask", "loss_weight"}
        torn = sum(int(batch.rows["side"][list(part)].sum() != 0) for part in plan)
        most = max(int(batch.lengths[list(part)].sum()) for part in plan)
        return {"flops": Metric.sum(0.0), "torn": Metric.sum(torn), "cuts": Metric.sum(len(plan)), "most": Metric.max(most)}


def test_rows_of_a_pair_are_in_one_micro_batch() -> None:
    sizes = [1, 9, 4, 4, 10, 1, 2, 3, 6, 6]
    ones = torch.ones(sum(sizes))
    batch = (
        numbered(sizes)
        .with_tokens(response_mask=ones, loss_weight=ones)
        .with_rows(side=torch.tensor([1, -1] * 5), uid=torch.arange(5).repeat_interleave(2))
    )
    with LocalBackend() as backend:
        actor = start(backend.start_group("workers", ResourcePool((2,), "cpu", "pool"), Paired))
        together = actor.train_step(batch, (), rows=("side",), units="uid")
        alone = actor.train_step(batch, (), rows=("side",))
    assert together["torn"].value == 0 < alone["torn"].value
    assert together["cuts"].value >= 4 and together["most"].value == 12


class Fails(Mirror):
    """Its memory has room for two units of three rows, 12 tokens."""

    def train_step(self, batch: Batch, plan: MicroBatches) -> dict[str, Metric]:
        tokens = [int(batch.lengths[list(part)].sum()) for part in plan]
        if max(tokens) > 12:
            raise RuntimeError("out of memory")
        return {"flops": Metric.sum(0.0), "cuts": Metric.sum(len(plan)), "most": Metric.max(max(tokens))}


def test_unit_over_the_limit_is_refused_and_limits_in_rows_count_units() -> None:
    sizes = [3, 5, 1, 4, 2, 2]
    ones = torch.ones(sum(sizes))
    batch = numbered(sizes).with_tokens(response_mask=ones, loss_weight=ones)
    batch = batch.with_rows(trajectory=torch.tensor([8, 8, 9, 8, 7, 7]), part=torch.tensor([0, 1, 0, 2, 0, 1]))
    with LocalBackend() as backend:
        actor = start(backend.start_group("workers", ResourcePool((1,), "cpu", "pool"), Fails))
        assert actor.train_step(batch, (), units="trajectory")["most"].value == 12
        refused = r"^rows 0, 1, 3 of one .* 3 \+ 5 \+ 4 = 12 tokens, .* is 11: raise .* to at least 12$"
        with pytest.raises(ValueError, match=refused):
            actor.train_limits = Limits(max_tokens=11)
            actor.train_step(batch, (), rows=("part",), units="trajectory")
        assert actor.train_step(batch, ())["most"].value == 9, "rows alone fit"
        actor.train_limits = Limits(max_rows=1)
        assert actor.train_step(batch, (), units="trajectory")["cuts"].value == 3
        actor.train_limits, actor.budget.most = Limits(max_tokens=20), Limits(max_tokens=3)
        assert actor.train_step(batch, (), units="trajectory")["most"].value == 12, "a budget never forbids the largest unit"


class Sharing(Mirror):
    """Records the most groups of two that a micro-batch splits, and the prompt lengths that it received."""

    def forward(self, batch: Batch, plan: MicroBatches, outputs: list[str], adapter: bool, snapshot: bool) -> Batch:
        return Batch(batch.lengths, tokens={"log_probs": self.split_groups(batch, plan)})

    def train_step(self, batch: Batch, plan: MicroBatches) -> dict[str, Metric]:
        return {"flops": Metric.sum(0.0), "split_groups": Metric.max(float(self.split_groups(batch, plan)[0]))}

    def split_groups(self, batch: Batch, plan: MicroBatches) -> torch.Tensor:
        assert batch.rows["prompt_length"].tolist() == [8] * len(batch)
        torn = sum(int(batch.tokens["input_ids"][batch.offsets[list(part)]].unique().numel() != len(part) // 2) for part in plan)
        return torch.full((batch.total_tokens,), float(torn))


@pytest.mark.parametrize("shares", [False, True])
def test_responses_to_a_prompt_share_a_micro_batch_if_the_engine_shares_prefixes(shares: bool) -> None:
    sizes = [9, 10, 9, 10, 9, 10]
    ones = torch.ones(sum(sizes))
    """Groups 0 and 1 have the same data row as their prompt."""
    columns = {"uid": torch.tensor([5, 5, 2, 5, 5, 2]), "group": torch.tensor([0, 1, 2, 0, 1, 2])}
    batch = numbered(sizes).with_rows(prompt_length=torch.full((6,), 8), **columns)
    first = torch.repeat_interleave(batch.rows["group"], batch.lengths)
    batch = batch.with_tokens(input_ids=first, response_mask=ones, loss_weight=ones)
    with LocalBackend() as backend:
        actor = start(backend.start_group("workers", ResourcePool((1,), "cpu", "pool"), Sharing), shares_prefixes=shares)
        torn = actor.forward(batch, ["log_probs"]).tokens["log_probs"][0], actor.train_step(batch, ())["split_groups"].value
    assert [float(count) == 0 for count in torn] == [shares, shares]


class Computing(Mirror):
    """Returns as log-probs the tokens of each micro-batch that its rank computes."""

    def forward(self, batch: Batch, plan: MicroBatches, outputs: list[str], adapter: bool, snapshot: bool) -> Batch:
        chains, counts = chains_by_tokens(batch), torch.zeros(len(batch))
        assert chains is not None
        for part in plan:
            counts[list(part)] = float(sum(batch.lengths[list(part)]) - sum(repeated(part, chains)))
        return Batch(batch.lengths, tokens={"log_probs": torch.repeat_interleave(counts, batch.lengths)})


def test_turns_that_are_rows_are_computed_once_under_the_limit() -> None:
    """Two conversations of three rows, of 12 tokens in all: a micro-batch of 12 tokens holds one of them."""
    rows = [
        row for ids in (10, 20) for row in conversation(ids, [ids] * 4, [([ids + turn, 1], [2]) for turn in range(3)], parts=True)
    ]
    batch = batch_of([*rows[::2], *rows[1::2]])
    with LocalBackend() as backend:
        actor = start(backend.start_group("workers", ResourcePool((1,), "cpu", "pool"), Computing), shares_prefixes=True)
        found = actor.forward(batch, ["log_probs"]).tokens["log_probs"]
    assert found.tolist() == [12.0] * batch.total_tokens


class Halved(Mirror):
    """Two ranks hold a copy of the model; the second, for example the last stage, returns the results of both."""

    def build_model(self, role: str, spec: object, loss: object) -> tuple[int, bool]:
        return self.rank // 2, self.rank % 2 == 1


def test_result_of_several_ranks_counts_once() -> None:
    ones = torch.ones(sum(SIZES))
    batch = numbered(SIZES).with_tokens(response_mask=ones, loss_weight=ones, advantages=ones)
    with LocalBackend() as backend:
        actor = start(backend.start_group("workers", ResourcePool((4,), "cpu", "pool"), Halved))
        metrics = actor.train_step(batch, ("advantages",))
        result = actor.forward(batch, ["log_probs"])
    assert metrics["rows"].value == len(SIZES) and actor.take_flops() == 20.0
    assert torch.equal(result.tokens["log_probs"], batch.tokens["input_ids"].double() / 2)


def test_each_shard_has_one_output_rank() -> None:
    mesh = mesh_of([(0, False), (0, True), (1, True), (1, False)])
    assert mesh.shard_of_rank == (0, 0, 1, 1) and mesh.output_ranks == (1, 2)
    with pytest.raises(ValueError):
        mesh_of([(0, False), (1, True)])


class EndedCall:
    """A future that is done."""

    begun, ended = 0.0, True

    def __init__(self, result: Callable[[], list[Any]], replies: object) -> None:
        self.result, self.replies = result, replies


class FailingGroup:
    """A group whose calls of one method are late or end in a death; all other calls succeed."""

    name = "workers"

    def __init__(self, method: str, kind: str) -> None:
        self.method, self.kind = method, kind
        self.limits: dict[str, float] = {}

    def register_mesh(self, name: str, mesh: object) -> None:
        """Its single engine needs none."""

    def call(self, call: Call[Any], *, phase: str, limit: Limit, mesh: str | None = None, replica: int | None = None) -> Any:
        self.limits[call.method] = limit.seconds
        replies = SimpleNamespace(ended={})
        result = partial(self._result, call.method, phase, limit)
        return EndedCall(result, replies)

    def _result(self, method: str, phase: str, limit: Limit) -> list[Any]:
        if method == self.method and self.kind == "late":
            raise PhaseTimeout(limit.of(phase), [1], 9.0)
        if method == self.method:
            raise WorkerError(1, phase, "it died", "last words")
        ended = ONE.with_rows(id=torch.tensor([0]))
        results = {"sync_weights": [{}], "stats": [{}], "advance": [ended], "forward": [ONE]}
        return results.get(method, [(0, True)])


ONE = Batch(torch.tensor([1]), tokens={"input_ids": torch.tensor([5]), "response_mask": torch.tensor([1])})
PHASES_OF = {
    "build_model": ("start of actor", "start"),
    "forward": ("forward of actor", "forward"),
    "train_step": ("update of actor", "update"),
    "save": ("save of actor", "save"),
    "load": ("load of actor", "load"),
    "export_hf": ("export of actor", "save"),
    "build_rollout": ("engine start (rollout engine vllm)", "start"),
    "advance": ("generation (rollout engine vllm)", "generate"),
    "sync_weights": ("weight sync (rollout engine vllm)", "sync"),
    "stats": ("counters (rollout engine vllm)", "ask"),
}


def call_everything(group: Any, limits: Watchdog) -> None:
    actor = start(group, limits)
    actor.forward(ONE, ["log_probs"])
    actor.save("path")
    actor.load("path")
    actor.export_hf("path")
    rollout = RemoteRollout(group, spec_of("somewhere", name="vllm"), "actor", limits)
    rollout.sync_weights(1)
    rollout.generate(ONE, SAMPLING, group_size=1)
    rollout.stats()
    actor.train_step(ONE.with_tokens(loss_weight=torch.ones(1)), ())


@pytest.mark.parametrize("method", PHASES_OF)
@pytest.mark.parametrize("kind", ["late", "dead"])
def test_late_or_dead_rank_is_named_with_the_phase_for_every_call(kind: str, method: str, tmp_path: Path) -> None:
    phase, key = PHASES_OF[method]
    limits = {phase: 100.0 + number for number, phase in enumerate(PHASES)}
    group = FailingGroup(method, kind)
    with pytest.raises((PhaseTimeout, WorkerError)) as raised:
        call_everything(group, watchdog(tmp_path, **limits))
    assert group.limits[method] == limits[key]
    message = (
        f"{phase}, limited by timeouts.{key}={limits[key]:g}, took more than 9 s: no answer from ranks [1]\nstep 0, phase {key}"
    )
    assert str(raised.value).startswith(message if kind == "late" else f"rank 1 failed in {phase}: it died\nlast words")


def test_description_of_the_work_of_a_rank() -> None:
    plan = make_plan(SIZES, 2, Limits(max_tokens=16), attention_cost=0.0)
    mesh = mesh_of([(0, True), (0, False), (1, True)])
    first, twin, other = work_by_rank(plan, SIZES, mesh)
    assert first == twin != other
    shares = [[SIZES[row] for row in rows] for rows in plan.shards]
    assert [first, other] == [
        f"{len(mine)} rows, {sum(mine)} tokens, {len(cuts)} micro-batches, longest row {max(mine)}"
        for mine, cuts in zip(shares, plan.micro_batches, strict=True)
    ]
