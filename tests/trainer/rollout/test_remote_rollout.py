"""Requests that the controller places on engines and responses that it joins, with workers that only record."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest
import torch

from tests.trainer.cluster.test_remote import PATIENT, SAMPLING, SIZES, EndedCall, Mirror
from tests.trainer.ppo.test_loop_stops import events_of
from tests.trainer.watchdogs import watchdog
from tests.workers.rollout.engines import spec_of
from tests.workers.test_batch import numbered
from trainer.cluster.launch import Replicas
from trainer.rollout.remote_rollout import RemoteRollout, RolloutFlow
from workers.batch import Batch
from workers.controller.group import WorkerError, WorkerGroup
from workers.controller.local_backend import LocalBackend
from workers.controller.resource_pool import ResourcePool
from workers.controller.rpc import Call, worker_call
from workers.metric import Metric


@pytest.fixture
def workers() -> Iterator[WorkerGroup]:
    with LocalBackend() as backend:
        yield backend.start_group("workers", ResourcePool((3,), "cpu", "pool"), Mirror)


def test_stats_are_summed_over_engines(workers: Any) -> None:
    assert RemoteRollout(workers, spec_of("somewhere"), "actor", PATIENT).stats() == {"prompt_tokens": 33.0}


def test_disaggregated_engines_receive_weights_while_the_trainer_sends(workers: Any) -> None:
    with LocalBackend() as backend:
        trainers = backend.start_group("trainers", ResourcePool((2,), "cpu", "pool"), Mirror)
        rollout = RemoteRollout(workers, spec_of("somewhere"), "actor", PATIENT, trainers=trainers)
        (mesh,) = rollout.meshes
        assert mesh.shard_of_rank == (0, 0, 1) and mesh.output_ranks == (0, 2)
        metrics = rollout.sync_weights(4)
        assert (metrics["version"].value, metrics["ranks"].value) == (4, 3)
        assert (
            trainers.call(worker_call(Mirror.has_sent)).result() == [True, True]
            and workers.call(worker_call(Mirror.has_sent)).result() == [False] * 3
        )


def test_group_of_the_trainer_is_colocated(workers: Any) -> None:
    rollout = RemoteRollout(workers, spec_of("somewhere"), "actor", PATIENT, trainers=workers)
    assert rollout.sync_weights(4)["ranks"].value == 3 and workers.call(worker_call(Mirror.has_sent)).result() == [False] * 3


@pytest.mark.parametrize("balance", ["static", "tokens"])
def test_responses_to_a_prompt_come_from_one_engine_in_order(workers: Any, balance: Literal["static", "tokens"]) -> None:
    rollout = RemoteRollout(workers, spec_of("somewhere", balance=balance), "actor", PATIENT)
    prompts = numbered(SIZES).only(tokens=["input_ids"], rows=["uid"])
    answers = rollout.generate(prompts, SAMPLING, group_size=4)
    assert as_lists_of(answers) == as_lists_of(prompts)
    engines = answers.rows["engine"].tolist()
    assert "id" not in answers.rows and [set(engines[start : start + 4]) for start in (0, 4, 8)] == [{0}, {1}, {2}]


class CountingGroup:
    """A group of one engine that completes what it gets at once. Records how many rows each call had."""

    name, world_size = "workers", 1

    def __init__(self) -> None:
        self.rows: list[int] = []

    def register_mesh(self, name: str, mesh: object) -> None:
        """Its single engine needs none."""

    def call(self, call: Call[Any], **_: object) -> Any:
        if call.method == "build_rollout":
            return EndedCall(lambda: [(0, True)], SimpleNamespace(ended={}))
        self.rows.append(len(call.args[0]))
        return EndedCall(lambda: [call.args[0]], SimpleNamespace(ended={}))


def test_engine_has_its_next_call_while_the_caller_works_on_responses() -> None:
    group: Any = CountingGroup()
    rollout = RemoteRollout(group, spec_of("somewhere", slots=4), "actor", PATIENT)
    calls_at_a_part = [(part.rows["id"].tolist(), len(group.rows)) for part in rollout.stream(numbered(SIZES), SAMPLING, 4)]
    assert group.rows == [4, 4, 4]
    assert calls_at_a_part == [([0, 1, 2, 3], 2), ([4, 5, 6, 7], 3), ([8, 9, 10, 11], 3)]


class ReplicaGroup:
    """Workers of one replica, in this process, that die at the given calls. A call runs four engine steps at most.

    An engine runs two requests at the same time. A request has as many steps as its seed, and as the log-prob of a step the
    number of requests that share it. calls: methods of all replicas that had these slots.
    """

    world_size = 1
    ends_between_calls = -1  # id of this request

    def __init__(self, name: str, calls: list[str], deaths: Sequence[int]) -> None:
        self.name = name
        self.calls, self.deaths = calls, deaths
        self.version = -1
        self.dead = False
        self.running: dict[int, tuple[int, list[float]]] = {}

    def register_mesh(self, name: str, mesh: object) -> None:
        """Its single engine needs none."""

    def shutdown(self) -> None:
        """They are dead already."""
        assert self.dead

    def call(self, call: Call[Any], *, phase: str, **_: object) -> Any:
        self.calls.append(call.method)
        self.dead = self.dead or len(self.calls) in self.deaths
        result = None if self.dead else getattr(self, call.method)(*call.args)

        def done() -> list[Any]:
            if self.dead:
                raise WorkerError(0, phase, "process 7 died", process_died=True)
            return [result]

        return EndedCall(done, SimpleNamespace(ended={}))

    def build_rollout_apart(self, role: str, spec: object, meeting: str) -> tuple[int, bool]:
        assert meeting == f"channel {self.name}"
        return 0, True

    def sync_weights(self, version: int, keep_cache: bool = False) -> dict[str, Metric]:
        self.version = version
        return {}

    def is_alive(self) -> None:
        pass

    def stats(self) -> dict[str, float]:
        return {"prompt_tokens": 1.0}

    def advance(
        self, prompts: Batch | None, sampling: object, steps: int, aborted: Sequence[int] = (), streams: bool = False
    ) -> Batch:
        assert not aborted
        rows = {"id": torch.tensor([]), "seed": torch.tensor([])} if prompts is None else prompts.rows
        for id, length in zip(rows["id"].tolist(), rows["seed"].tolist(), strict=True):
            assert id not in self.running, f"request {id} is there already"
            self.running[id] = length, []
        ended: dict[int, list[float]] = {}
        for _ in range(min(steps, 4)):
            sharing = list(self.running.items())[:2]
            for id, (length, log_probs) in sharing:
                log_probs.append(float(len(sharing)))
                if len(log_probs) == length:
                    ended[id] = self.running.pop(id)[1]
        responses = self.responses(ended)
        return responses.with_rows(ended=torch.ones(len(responses), dtype=torch.bool)) if streams else responses

    def suspend(self) -> Batch:
        responses = self.responses({id: log_probs for id, (_, log_probs) in self.running.items()})
        self.running.clear()
        return responses.with_rows(ended=responses.rows["id"] == self.ends_between_calls)

    def responses(self, log_probs: dict[int, list[float]]) -> Batch:
        return Batch(
            torch.tensor([*map(len, log_probs.values())], dtype=torch.int64),
            tokens={
                "rollout_log_probs": torch.tensor([value for of_row in log_probs.values() for value in of_row]),
                "weight_version": torch.full((sum(map(len, log_probs.values())),), self.version),
            },
            rows={"id": torch.tensor([*log_probs], dtype=torch.int64)},
        )


class TrainerGroup:
    """The trainer's workers, which record the replicas that they send weights to."""

    name, world_size = "trainers", 1

    def __init__(self) -> None:
        self.sent: list[list[int]] = []

    def call(self, call: Call[Any], **_: object) -> Any:
        if call.method == "offer_weights":
            return EndedCall(lambda: [f"channel {call.args[2]}"], SimpleNamespace(ended={}))
        self.sent.append(*call.args)
        return EndedCall(lambda: [None], SimpleNamespace(ended={}))


class Disturbed:
    """Two replicas of a pool of their own, of which the second dies at these calls, counted over all that had its slots."""

    def __init__(self, *deaths: int, **engine: Any) -> None:
        self.calls: tuple[list[str], list[str]] = ([], [])
        self.replaced: list[str] = []
        self.trainers = TrainerGroup()
        starts = [partial(ReplicaGroup, str(number), calls, deaths if number else ()) for number, calls in enumerate(self.calls)]
        replicas = Replicas(cast(Any, [start() for start in starts]), cast(Any, starts), self.replacement)
        trainers: Any = self.trainers
        self.rollout = RemoteRollout(replicas, spec_of("somewhere", **engine), "actor", PATIENT, trainers=trainers)
        self.rollout.sync_weights(4)

    @contextmanager
    def replacement(self, what: str, death: WorkerError) -> Iterator[None]:
        if len(self.replaced) == 3:
            raise death
        yield
        self.replaced.append(what)

    def flow(
        self, lengths: Sequence[int], *, in_step: bool | None = None, replaces: bool = True, admitted: int | None = None
    ) -> RolloutFlow:
        """A flow with requests of these lengths, of which the first ``admitted``, or all, are admitted."""
        rows = Batch(
            torch.ones(len(lengths), dtype=torch.int64),
            tokens={"input_ids": torch.arange(len(lengths))},
            rows={"id": torch.arange(len(lengths)), "seed": torch.tensor(lengths)},
        )
        flow = self.rollout.flow(SAMPLING, rows.select, expected=len(lengths), in_step=in_step, replaces=replaces)
        for row in range(len(lengths) if admitted is None else admitted):
            flow.admit([row], 1)
        return flow


Row = tuple[int, list[float], list[int]]


def rows_of(batch: Batch) -> list[Row]:
    columns = [batch.split_rows(name) for name in ("rollout_log_probs", "weight_version")]
    return [(id, *(column[row].tolist() for column in columns)) for row, id in enumerate(batch.rows["id"].tolist())]


def ticks_of(flow: RolloutFlow, until: int = 99) -> list[list[Row]]:
    """Responses of each tick, in the order of their ids."""
    ticks = []
    while len(ticks) < until and flow.start():
        ticks.append(sorted(row for part in flow.wait() for row in rows_of(part)))
    return ticks


LENGTHS = [5, 14, 3, 9, 8, 6, 2, 11, 13, 4, 7, 10]
BEFORE_A_FLOW = 3  # calls of a replica: build, is_alive, sync


@pytest.mark.parametrize("balance", ["static", "tokens"])
@pytest.mark.parametrize("deaths", [(4,), (6,), (9,), (5, 10), (6, 9)])
def test_replaced_replica_continues_where_the_first_one_died(
    balance: Literal["static", "tokens"], deaths: tuple[int, ...]
) -> None:
    """Responses, log-probs and the ticks at which they end are those without a death; the second may be in a repeated call."""
    undisturbed, disturbed = Disturbed(balance=balance, slots=4), Disturbed(*deaths, balance=balance, slots=4)
    wanted = ticks_of(undisturbed.flow(LENGTHS, in_step=True))
    assert ticks_of(disturbed.flow(LENGTHS, in_step=True)) == wanted
    assert sorted(id for tick in wanted for id, *_ in tick) == [*range(len(LENGTHS))]
    assert {version for tick in wanted for *_, versions in tick for version in versions} == {4}
    assert disturbed.replaced == ["replica 1 of rollout"] * len(deaths)
    assert disturbed.trainers.sent == [[0, 1], *[[1]] * len(deaths)]
    assert disturbed.calls[0] == undisturbed.calls[0], "the other replica has no additional call"


def test_calls_with_and_without_streams_may_end_together() -> None:
    """Of a server: a client reads along at one replica, while the call of another one began before."""
    flow = Disturbed(balance="static").flow([2, 3], in_step=False, admitted=0)
    for row, streams in ((0, False), (1, True)):
        flow.admit([row], 1)
        flow.start(streams=streams)
    assert sorted(id for part in flow.wait() for id, *_ in rows_of(part)) == [0, 1]


def test_replicas_that_do_not_wait_for_each_other_lose_no_response() -> None:
    flow = Disturbed(6, 11, balance="static").flow(LENGTHS)
    assert sorted(id for tick in ticks_of(flow) for id, *_ in tick) == [*range(len(LENGTHS))]


@pytest.mark.parametrize("engine", ["embedded", "sglang"])
def test_death_while_unfinished_responses_are_taken(engine: Literal["embedded", "sglang"]) -> None:
    """They are those without a death; from SGLang, whose steps cannot be repeated, the requests without tokens."""
    parts = []
    for deaths in ((), (BEFORE_A_FLOW + 3,)):
        disturbed = Disturbed(*deaths, name=engine)
        flow = disturbed.flow(LENGTHS)
        ticks = ticks_of(flow, until=2)
        ended, interrupted = flow.suspend()
        parts.append((ticks, [*map(rows_of, ended)], [sorted(rows_of(part)) for part in interrupted]))
        assert len(disturbed.replaced) == len(deaths)
    if engine == "embedded":
        assert parts[0] == parts[1]
    else:
        (*_, (others, wanted)), (*_, (same, found)) = parts
        assert others == same and [(id, [], []) for id, *_ in wanted] == found != wanted


def test_responses_that_ended_between_the_calls_are_not_interrupted() -> None:
    disturbed = Disturbed(name="sglang")
    flow = disturbed.flow(LENGTHS)
    done = {id for tick in ticks_of(flow, until=2) for id, *_ in tick}
    last = max(set(range(len(LENGTHS))) - done)
    for group in disturbed.rollout.groups:
        cast(Any, group).ends_between_calls = last
    ended, interrupted = flow.suspend()
    late = [id for part in ended for id, *_ in rows_of(part)]
    left = [id for part in interrupted for id, *_ in rows_of(part)]
    assert last in late and last not in left and sorted([*done, *late, *left]) == [*range(len(LENGTHS))]


@pytest.mark.parametrize("death", [4, 5, 7])
def test_unfinished_requests_of_an_engine_with_its_own_clock_start_again(death: int) -> None:
    disturbed = Disturbed(death, name="sglang")
    ended = [id for tick in ticks_of(disturbed.flow(LENGTHS)) for id, *_ in tick]
    assert sorted(ended) == [*range(len(LENGTHS))] and len(disturbed.replaced) == 1


def test_replica_that_died_between_flows_is_replaced_before_the_next_sync() -> None:
    disturbed = Disturbed(4)
    disturbed.rollout.sync_weights(5)
    assert disturbed.replaced == ["replica 1 of rollout"] and disturbed.trainers.sent == [[0, 1], [0, 1]]
    assert {version for tick in ticks_of(disturbed.flow(LENGTHS)) for *_, versions in tick for version in versions} == {5}


@pytest.mark.parametrize("in_step", [True, False])
@pytest.mark.parametrize("balance", ["static", "tokens"])
@pytest.mark.parametrize("death", range(BEFORE_A_FLOW + 1, BEFORE_A_FLOW + 6))
def test_flow_continues_without_a_replica_that_may_not_be_replaced(
    death: int, balance: Literal["static", "tokens"], in_step: bool, tmp_path: Path
) -> None:
    """The requests that it had return nothing, those that waited go to the other one; the next sync replaces it."""
    disturbed = Disturbed(death, balance=balance, slots=4)
    disturbed.rollout.watchdog = watchdog(tmp_path)
    flow = disturbed.flow(LENGTHS, in_step=in_step, replaces=False)
    ended = [id for tick in ticks_of(flow) for id, *_ in tick]
    assert not flow.start() and disturbed.replaced == [] and disturbed.trainers.sent == [[0, 1]]
    calls = len(disturbed.calls[1])
    late, interrupted = flow.suspend()
    assert late == [] and [len(part) for part in interrupted] == [0] and len(disturbed.calls[1]) == calls, "it is not called"
    lost = {*range(len(LENGTHS))} - {*ended}
    assert len(ended) == len({*ended}) and lost
    assert balance == "static" or len(lost) <= 5, "a replica has no more at the same time"
    ((step, kind, text),) = events_of(tmp_path)
    assert (step, kind) == (0, "lost") and re.fullmatch(
        r"replica 1 of rollout generates nothing until the next weight sync: rank 0 failed in .* process 7 died", text
    )
    disturbed.rollout.sync_weights(5)
    assert disturbed.replaced == ["replica 1 of rollout"] and disturbed.trainers.sent == [[0, 1], [0, 1]]
    again = ticks_of(disturbed.flow(LENGTHS, in_step=in_step, replaces=False))
    assert sorted(id for tick in again for id, *_ in tick) == [*range(len(LENGTHS))]
    assert {version for tick in again for *_, versions in tick for version in versions} == {5}


@pytest.mark.parametrize("in_step", [True, False])
def test_replica_that_dies_while_unfinished_responses_are_taken_returns_none(in_step: bool, tmp_path: Path) -> None:
    disturbed = Disturbed(BEFORE_A_FLOW + 3)
    disturbed.rollout.watchdog = watchdog(tmp_path)
    flow = disturbed.flow(LENGTHS, in_step=in_step, replaces=False)
    ended = {id for tick in ticks_of(flow, until=2) for id, *_ in tick}
    late, (interrupted,) = flow.suspend()
    of_first = {id for id, *_ in rows_of(interrupted)}
    assert late == [] and of_first and not of_first & ended and len(of_first | ended) < len(LENGTHS)
    assert [kind for _, kind, _ in events_of(tmp_path)] == ["lost"]


@pytest.mark.parametrize("slow", [0, 1])
def test_slow_replica_holds_no_other_in_wall_clock(slow: int) -> None:
    """Calls on it do not return until the other replica has generated all that it has."""
    disturbed = Disturbed(balance="static")
    fast = 1 - slow
    of_fast = [row for row in range(len(LENGTHS)) if row % 2 == fast]

    def results(calls: Any, *, every: bool) -> Any:
        assert not every
        ready = [call for call in calls if int(call.pool) == fast] or calls
        return PATIENT.results(ready, every=True)

    disturbed.rollout.watchdog = cast(Any, SimpleNamespace(start=PATIENT.start, results=results))
    flow = disturbed.flow(LENGTHS, in_step=False)
    ended = [id for tick in ticks_of(flow) for id, *_ in tick]
    assert sorted(ended[: len(of_fast)]) == of_fast and sorted(ended) == [*range(len(LENGTHS))]


def test_death_without_a_replacement_is_raised() -> None:
    disturbed = Disturbed(4, 7, 10, 13, balance="tokens")
    with pytest.raises(WorkerError, match=r"generation \(rollout engine embedded, replica 1\): process 7 died"):
        ticks_of(disturbed.flow(LENGTHS))
    assert len(disturbed.replaced) == 3


def test_stats_are_summed_over_replicas() -> None:
    assert Disturbed().rollout.stats() == {"prompt_tokens": 2.0}


def as_lists_of(batch: Batch) -> list[tuple[list[int], int]]:
    return [(ids.tolist(), uid) for ids, uid in zip(batch.split_rows("input_ids"), batch.rows["uid"].tolist(), strict=True)]
