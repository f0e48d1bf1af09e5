"""Groups of toy workers: the same on both backends."""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from tests.workers.controller.toy import Toy
from workers.controller.group import Backend, Future, Replies, WorkerError, WorkerGroup, wait_any
from workers.controller.local_backend import LocalBackend
from workers.controller.ray.ray_backend import RayBackend
from workers.controller.resource_pool import ResourcePool
from workers.controller.rpc import Call, Mesh, Sharded, worker_call

TOY = "tests.workers.controller.toy:Toy"


@pytest.fixture(scope="module", params=["local", "ray"])
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    if request.param == "local":
        with LocalBackend() as backend:
            yield backend
    else:
        run_dir = tmp_path_factory.mktemp("run")
        with RayBackend(run_dir=run_dir, nnodes=1, n_gpus_per_node=6, device="cpu", ray_init={}) as backend:
            yield backend


@pytest.fixture(scope="module")
def four(backend: Backend) -> WorkerGroup:
    """Two replicas of two ranks: mesh ``rollout`` has two shards; the second rank returns results of the second one."""
    group = backend.start_group("four", ResourcePool((4,), "cpu", "p"), TOY, "given", n=3, env={"TOY_SAYS": "hello"})
    group.register_mesh("rollout", Mesh(shard_of_rank=(0, 0, 1, 1), output_ranks=(0, 3)))
    return group


def two(backend: Backend, **kwargs: object) -> WorkerGroup:
    return backend.start_group("two", ResourcePool((2,), "cpu", "p"), TOY, **kwargs)


def test_worker_has_its_rank_and_place(four: WorkerGroup) -> None:
    infos = four.call(worker_call(Toy.stands)).result()
    assert [(info.rank, info.world_size, info.local_rank, info.node_rank) for info in infos] == [(r, 4, r, 0) for r in range(4)]
    assert len({(info.master_addr, info.master_port) for info in infos}) == 1
    assert infos[0].master_addr == "127.0.0.1"
    assert four.call(worker_call(Toy.built_with)).result() == [(("given",), {"n": 3})] * 4


def test_environment_reaches_the_workers(four: WorkerGroup) -> None:
    assert four.call(worker_call(Toy.environment, "TOY_SAYS", "OMP_NUM_THREADS")).result() == [["hello", "1"]] * 4


def test_call_without_a_mesh_goes_to_all_ranks(four: WorkerGroup) -> None:
    assert four.call(worker_call(Toy.echo, 1, two="2")).result() == [(rank, (1,), {"two": "2"}) for rank in range(4)]


def test_mesh_splits_sharded_arguments(four: WorkerGroup) -> None:
    future = four.call(worker_call(Toy.echo, "all", Sharded(["left", "right"]), plan=Sharded([{1}, {2}])), mesh="rollout")
    assert future.result() == [(0, ("all", "left"), {"plan": {1}}), (3, ("all", "right"), {"plan": {2}})]
    assert future.done() and future.result() == future.result()


def test_all_ranks_of_a_shard_work(four: WorkerGroup) -> None:
    before = four.call(worker_call(Toy.note, "before")).result()
    four.call(worker_call(Toy.note, Sharded(["left", "right"])), mesh="rollout").result()
    assert [noted[-1] for noted in four.call(worker_call(Toy.noted)).result()] == ["left", "left", "right", "right"]
    assert four.call(worker_call(Toy.note, "after")).result() == [count + 2 for count in before]


def test_only_results_of_output_ranks_are_sent(four: WorkerGroup) -> None:
    assert four.call(worker_call(Toy.lock_unless, 0, 3), mesh="rollout").result() == [0, 3]
    with pytest.raises(WorkerError, match=r"rank [12] failed in lock_unless: TypeError: cannot pickle"):
        four.call(worker_call(Toy.lock_unless, 0, 3)).result()


def test_calls_keep_their_order(backend: Backend) -> None:
    group = two(backend)
    futures = [group.call(worker_call(Toy.note, number, pause=0.01 if number % 3 == 0 else 0.0)) for number in range(12)]
    assert futures[-1].result() == [12, 12]
    assert group.call(worker_call(Toy.noted)).result() == [list(range(12))] * 2
    assert [future.result() for future in futures] == [[number + 1] * 2 for number in range(12)]
    group.shutdown()


def test_call_on_one_replica_does_not_reach_other_ranks(four: WorkerGroup) -> None:
    before = four.call(worker_call(Toy.noted)).result()
    future = four.call(worker_call(Toy.note, "one replica"), mesh="rollout", replica=1)
    assert future.result() == [len(before[3]) + 1], "the answering rank of the replica is its second"
    after = [calls[len(old) :] for calls, old in zip(four.call(worker_call(Toy.noted)).result(), before, strict=True)]
    assert after == [[], [], ["one replica"], ["one replica"]]
    assert future.replies.ended.keys() == {2, 3}


def test_calls_queue_on_a_replica_and_replicas_run_independently(backend: Backend, four: WorkerGroup) -> None:
    """Two calls are queued on each replica. On Ray the slow replica does not delay the fast one."""
    pause = 2.0 if isinstance(backend, RayBackend) else 0.0
    slow = [four.call(worker_call(Toy.note, name, pause=pause), mesh="rollout", replica=0) for name in ("a", "b")]
    fast = [four.call(worker_call(Toy.note, name), mesh="rollout", replica=1) for name in ("c", "d")]
    done = wait_any([*slow, *fast])
    if pause:
        assert done and not set(done) & set(slow) and not slow[1].done()
    (first,), (second,) = slow[0].result(), slow[1].result()
    assert second == first + 1, "in the order of the calls"
    assert wait_any([*slow, *fast]) == [*slow, *fast], "all completed calls, in the given order"
    assert [noted[-2:] for noted in four.call(worker_call(Toy.noted)).result()] == [["a", "b"]] * 2 + [["c", "d"]] * 2


class OneReply(Replies):
    """Result of one rank, which has arrived (a value) or never does (None). requests: timeouts of the calls of ``wait``."""

    requests: ClassVar[list[float | None]] = []

    def __init__(self, value: object) -> None:
        super().__init__([0])
        self.value = value

    def receive(self, timeout: float | None) -> None:
        if self.value is not None:
            self.add(0, self.value, 0.0)

    @staticmethod
    def wait(several: Sequence[Any], timeout: float | None) -> list[Any]:
        OneReply.requests.append(timeout)
        return [one for one in several if one.value is not None]


def test_results_of_several_calls_take_one_request_to_the_backend() -> None:
    ended, arrived, hanging = (Future[Any]("work", OneReply(value), [0], begun=0.0) for value in (1, 2, None))
    assert ended.done()
    OneReply.requests.clear()
    assert wait_any([hanging, arrived, ended], 60.0) == [arrived, ended]
    assert OneReply.requests == [0.0], "a call has ended: nothing to wait for"
    late = Future[Any]("work", OneReply(3), [0], begun=0.0)
    assert wait_any([hanging, late], 1.0) == [late] and len(OneReply.requests) == 2
    assert 0.0 < (OneReply.requests[1] or 0.0) <= 1.0


def test_errors_contain_the_phase_of_the_call(four: WorkerGroup) -> None:
    with pytest.raises(WorkerError, match=r"^rank 2 failed in update of actor: KeyError"):
        four.call(worker_call(Toy.fail, 2), phase="update of actor").result()


def test_controller_and_worker_do_not_share_arguments(four: WorkerGroup) -> None:
    """Also if a large argument is stored once for all ranks."""
    tensor = torch.zeros(100_000)
    assert four.call(worker_call(Toy.spoil, tensor)).result() == [100_000.0] * 4
    assert four.call(worker_call(Toy.spoil, np.zeros(100_000))).result() == [100_000.0] * 4
    assert tensor.sum() == 0
    results = four.call(worker_call(Toy.same, tensor)).result()
    results[0] += 1
    assert results[1].sum() == 0 and results[0].sum() == 100_000


def test_failing_rank_is_named(four: WorkerGroup) -> None:
    future = four.call(worker_call(Toy.fail, 2))
    with pytest.raises(WorkerError) as raised:
        future.result()
    error = raised.value
    assert (error.rank, error.phase, error.message) == (2, "fail", "KeyError: 'no such thing'")
    assert "toy.py" in error.remote_traceback and "rank 2 failed in fail: KeyError" in str(error)
    assert future.done()
    with pytest.raises(WorkerError):
        future.result()
    assert four.call(worker_call(Toy.echo)).result()[2] == (2, (), {}), "an error of a method leaves the worker alive"


@pytest.mark.parametrize(
    ("method", "message"),
    [("no_such_method", "AttributeError: 'Toy' object has no attribute 'no_such_method'"), ("quit", "SystemExit: a library")],
)
def test_other_errors_of_a_worker_are_named(four: WorkerGroup, method: str, message: str) -> None:
    with pytest.raises(WorkerError, match=message):
        four.call(Call(None, method, (), {})).result()


def test_failing_constructor_is_named(backend: Backend) -> None:
    group = two(backend, fails_on=1)
    for _ in range(2):
        with pytest.raises(WorkerError, match="rank 1 failed in __init__: ValueError: rank 1 fails on request"):
            group.call(worker_call(Toy.stands)).result()
    group.shutdown()


def test_worker_class_that_cannot_be_imported_is_named(backend: Backend) -> None:
    group = backend.start_group("none", ResourcePool((1,), "cpu", "p"), "tests.workers.controller.toy:Tot")
    with pytest.raises(WorkerError, match=r"rank 0 failed in __init__: AttributeError: .*'Tot'"):
        group.call(worker_call(Toy.stands)).result()
    group.shutdown()


def test_worker_class_is_accepted_instead_of_its_name(backend: Backend) -> None:
    group = backend.start_group("class", ResourcePool((1,), "cpu", "p"), Toy, "given")
    assert group.call(worker_call(Toy.built_with)).result() == [(("given",), {})]
    group.shutdown()


def test_slots_are_released_when_a_group_is_shut_down(backend: Backend, four: WorkerGroup) -> None:
    """Four of six slots are taken."""
    for _ in range(2):
        group = two(backend)
        group.call(worker_call(Toy.stands)).result()
        group.shutdown()
        with pytest.raises(RuntimeError, match="stands was called on group 'two' after its shutdown"):
            group.call(worker_call(Toy.stands))


def test_calls_that_do_not_match_the_mesh_are_refused(four: WorkerGroup) -> None:
    with pytest.raises(ValueError, match=r"echo on mesh 'rollout': argument 0 has 3 items, the mesh 2 shards over 4 ranks"):
        four.call(worker_call(Toy.echo, Sharded([1, 2, 3])), mesh="rollout")
    with pytest.raises(ValueError, match=r"echo: group 'four' has no mesh 'train', only \['rollout'\]"):
        four.call(worker_call(Toy.echo), mesh="train")
    with pytest.raises(ValueError, match=r"echo: arguments \['x'\] are Sharded, but the call names no mesh"):
        four.call(worker_call(Toy.echo, x=Sharded([1, 2])))
    with pytest.raises(ValueError, match=r"echo: mesh 'rollout' has 2 shards, no replica 2"):
        four.call(worker_call(Toy.echo), mesh="rollout", replica=2)
    with pytest.raises(ValueError, match=r"echo: arguments \[0\] are Sharded, but the call is for replica 0 alone"):
        four.call(worker_call(Toy.echo, Sharded([1, 2])), mesh="rollout", replica=0)
    with pytest.raises(ValueError, match=r"echo: it is for replica 0, but the call names no mesh"):
        four.call(worker_call(Toy.echo), replica=0)
    with pytest.raises(ValueError, match="mesh 'small' has 1 ranks, group 'four' 4"):
        four.register_mesh("small", Mesh((0,), (0,)))
    with pytest.raises(ValueError, match="has a mesh 'rollout' already"):
        four.register_mesh("rollout", Mesh((0, 0, 1, 1), (0, 2)))
