"""Requests that the controller places on engines and responses that it joins, with workers that only record."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from tests.trainer.cluster.test_remote import PATIENT, SAMPLING, SIZES, EndedCall, Mirror
from tests.workers.rollout.engines import spec_of
from tests.workers.test_batch import numbered
from trainer.rollout.remote_rollout import RemoteRollout
from workers.batch import Batch
from workers.controller.group import WorkerGroup
from workers.controller.local_backend import LocalBackend
from workers.controller.resource_pool import ResourcePool
from workers.controller.rpc import Call, worker_call


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
        assert rollout.mesh.shard_of_rank == (0, 0, 1) and rollout.mesh.output_ranks == (0, 2)
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


def as_lists_of(batch: Batch) -> list[tuple[list[int], int]]:
    return [(ids.tolist(), uid) for ids, uid in zip(batch.split_rows("input_ids"), batch.rows["uid"].tolist(), strict=True)]
