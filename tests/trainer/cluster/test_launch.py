"""The worker groups that a placement starts."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import pytest

from configs.compose import compose
from configs.schema.placement import ROLES, place
from configs.schema.ppo import PPOConfig
from trainer.cluster.launch import RunWorkers, check_device, start_pools
from workers.controller.group import Backend, Transport, WorkerError, WorkerGroup
from workers.controller.resource_pool import ResourcePool


class EndedTransport:
    """Records the end of a group."""

    def __init__(self, ended: list[str], name: str) -> None:
        self._ended, self._name = ended, name

    def close(self) -> None:
        self._ended.append(self._name)


@contextmanager
def unlimited(what: str, death: WorkerError) -> Iterator[None]:
    yield


@contextmanager
def refused(what: str, death: WorkerError) -> Iterator[None]:
    assert what == "replica 1 of rollout"
    raise death
    yield


class RecordingBackend(Backend):
    """Records the requested groups."""

    def __init__(self) -> None:
        self.pools: dict[str, ResourcePool] = {}
        self.fractions: dict[str, float] = {}
        self.started: list[str] = []
        self.ended: list[str] = []

    def start_group(
        self,
        name: str,
        pool: ResourcePool,
        worker: str | type,
        /,
        *args: Any,
        env: Mapping[str, str] | None = None,
        memory_fraction: float = 1.0,
        **kwargs: Any,
    ) -> WorkerGroup:
        self.pools[name] = pool
        self.fractions[name] = memory_fraction
        self.started.append(name)
        return WorkerGroup(name, pool.world_size, cast(Transport, EndedTransport(self.ended, name)))

    def shutdown(self) -> None:
        pass


def started(*overrides: str, ranks: int = 1, replacement: Any = unlimited) -> tuple[RecordingBackend, RunWorkers]:
    config = compose("ppo_trainer", PPOConfig, overrides)
    backend, pools = RecordingBackend(), place(config.placement, config.trainer, ("actor", "ref", "critic", "rollout"))
    words = {"engine": "embedded", "engine_ranks": ranks, "replacement": replacement}
    return backend, start_pools(backend, config.trainer, pools, config.timeouts, **words)


def test_single_pool_has_all_workers() -> None:
    backend, workers = started("trainer.nnodes=2")
    assert backend.pools == {"workers": ResourcePool((8, 8), "cuda", "workers")}
    assert workers.of_role.keys() == set(ROLES) and len(workers.groups()) == 1 and workers.replicas is None


def test_pools_share_one_reservation_of_gpus() -> None:
    """Each pool is at its place with its part of the memory; a role has the group of its pool."""
    backend, workers = started(
        "placement=custom", "placement.roles.actor=train", "placement.roles.critic=value", "placement.roles.rollout=engines",
        "placement.pools={train: {nodes: 2, gpus: 4, fraction: 1}, value: {nodes: 1, gpus: 2, fraction: 0.25}, "
        "engines: {nodes: 1, gpus: 2, fraction: 0.75}}", "trainer.nnodes=2", "trainer.n_gpus_per_node=6",
    )  # fmt: skip
    room = ResourcePool((6, 6), "cuda", "workers")
    assert backend.pools == {
        "train": ResourcePool((4, 4), "cuda", "train", room=room),
        "value": ResourcePool((2,), "cuda", "value", room=room, first_slot=4),
        "engines.0": ResourcePool((2,), "cuda", "engines.0", room=room, first_slot=4, ranks=range(1)),
        "engines.1": ResourcePool((2,), "cuda", "engines.1", room=room, first_slot=4, ranks=range(1, 2)),
    }
    assert backend.fractions == {"train": 1.0, "value": 0.25, "engines.0": 0.75, "engines.1": 0.75}
    names = {role: group.name for role, group in workers.of_role.items()}
    assert names == {"actor": "train", "ref": "train", "critic": "value", "reward": "train"}
    assert [group.name for group in workers.groups()] == ["train", "value", "engines.0", "engines.1"]


def test_single_smaller_pool_reserves_only_its_own_gpus() -> None:
    backend, _ = started("placement=custom", "placement.roles.actor=a", "placement.pools.a={nodes: 1, gpus: 3, fraction: 1}")
    assert [pool.world_size for pool in backend.pools.values()] == [3]


ENGINES = (
    "placement=custom", "placement.roles.actor=train", "placement.roles.rollout=engines", "trainer.n_gpus_per_node=6",
    "placement.pools={train: {nodes: 1, gpus: 2, fraction: 1}, engines: {nodes: 1, gpus: 4, fraction: 1}}",
)  # fmt: skip


def test_replica_has_a_group_with_all_its_ranks() -> None:
    backend, _ = started(*ENGINES, ranks=2)
    assert list(backend.pools) == ["train", "engines.0", "engines.1"]
    assert [backend.pools["engines.1"].place(rank) for rank in range(2)] == [(0, 4), (0, 5)]
    backend, _ = started(*ENGINES, ranks=4)
    assert list(backend.pools) == ["train", "engines"], "the only replica has the whole pool, and its name"


def test_replicas_that_share_their_pool_with_a_role_are_one_group() -> None:
    backend, workers = started(*ENGINES, "placement.roles.critic=engines")
    assert list(backend.pools) == ["train", "engines"] and workers.replicas is None
    assert workers.of_role["rollout"] is workers.of_role["critic"] is not workers.of_role["actor"]


def test_replaced_replica_has_new_workers_on_its_slots() -> None:
    backend, workers = started(*ENGINES, ranks=2)
    replicas = workers.replicas
    assert replicas is not None
    before, slots = workers.groups(), backend.pools.copy()
    with replicas.replaced(1, WorkerError(0, "generation", "process 7 died")):
        assert backend.ended == ["engines.1"] and backend.started == ["train", "engines.0", "engines.1", "engines.1"]
    assert backend.pools == slots
    assert [old is new for old, new in zip(before, workers.groups(), strict=True)] == [True, True, False]


def test_refused_replacement_starts_nothing() -> None:
    backend, workers = started(*ENGINES, ranks=2, replacement=refused)
    assert workers.replicas is not None
    with pytest.raises(WorkerError, match="process 7 died"), workers.replicas.replaced(1, WorkerError(0, "x", "process 7 died")):
        pass
    assert backend.ended == [] and len(backend.started) == 3


@pytest.mark.parametrize(("workers", "noted"), [(2, False), (3, True)])
def test_more_workers_than_cores_are_noted(
    workers: int, noted: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {4, 7})
    words = ["trainer.device=cpu", f"trainer.n_gpus_per_node={workers}"]
    check_device(compose("ppo_trainer", PPOConfig, words).trainer)
    assert (f"note: trainer.n_gpus_per_node={workers}: a worker per core is fastest" in capsys.readouterr().err) == noted


def test_far_more_workers_than_cores_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {4, 7})
    check_device(compose("ppo_trainer", PPOConfig, ["trainer.device=cpu", "trainer.n_gpus_per_node=16"]).trainer)
    with pytest.raises(ValueError, match=r"n_gpus_per_node=17: 2 cores do not start that many workers; use 16 at most"):
        check_device(compose("ppo_trainer", PPOConfig, ["trainer.device=cpu", "trainer.n_gpus_per_node=17"]).trainer)
