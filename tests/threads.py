"""Runs whose pools are threads of this process: the concurrency of a split placement without the start of Ray's processes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

import pytest
import torch.distributed as dist

from workers.controller.environment import set_environment
from workers.controller.group import Backend, Replies, Transport, WorkerGroup, WorkerInfo
from workers.controller.ports import hold_port
from workers.controller.resource_pool import ResourcePool
from workers.controller.rpc import Arguments, Call, Executor, Failure, PackedMessage, pack, unpack

_ARRIVED = threading.Condition()
_BUILDING = threading.Lock()
JOIN_SECONDS = 20.0


def use_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the workers of trainer.backend=ray as threads. Pools and replicas of one rank only.

    They share torch's default process group, which has this one rank too.
    """
    opened = [0]
    init, destroy = dist.init_process_group, dist.destroy_process_group

    def join(*args: Any, **options: Any) -> None:
        opened[0] += 1
        if opened[0] == 1:
            init(*args, **options)

    def leave(group: Any = None) -> None:
        if group is not None:
            destroy(group)
            return
        opened[0] -= 1
        if opened[0] == 0:
            destroy()

    monkeypatch.setattr(dist, "init_process_group", join)
    monkeypatch.setattr(dist, "destroy_process_group", leave)
    monkeypatch.setattr("workers.controller.ray.ray_backend.RayBackend", ThreadBackend)


class ThreadBackend(Backend):
    """One thread for each worker; arguments and results are packed as on Ray."""

    def __init__(self, **options: Any) -> None:
        self._groups: list[WorkerGroup] = []

    def start_group(
        self,
        name: str,
        pool: ResourcePool,
        worker: str | type,
        /,
        *args: Any,
        env: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> WorkerGroup:
        assert pool.world_size == 1, "ranks of a thread each would need process groups of their own"
        group = WorkerGroup(name, 1, _ThreadTransport(pool, worker, pack((args, kwargs)), env or {}))
        self._groups.append(group)
        return group

    def shutdown(self) -> None:
        for group in self._groups:
            group.shutdown()


class _ThreadTransport(Transport):
    def __init__(self, pool: ResourcePool, worker: str | type, arguments: PackedMessage, env: Mapping[str, str]) -> None:
        self._calls: SimpleQueue[tuple[Call[Any], Arguments, bool, _ThreadReplies] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, args=(pool, worker, arguments, env), daemon=True)
        self._thread.start()

    def _work(self, pool: ResourcePool, worker: str | type, arguments: PackedMessage, env: Mapping[str, str]) -> None:
        executor = Executor()
        node, local_rank = pool.place(0)
        with hold_port() as port, set_environment(env):
            info = WorkerInfo(0, 1, local_rank, node, "127.0.0.1", port.getsockname()[1], pool.n_parts)
            with _BUILDING:  # torch's default generator belongs to the process
                executor.start(info, pack(worker), arguments)
            while (item := self._calls.get()) is not None:
                call, asked, wanted, replies = item
                with _BUILDING if call.method.startswith("build") else threading.Lock():
                    replies.record(executor.call(call.role, call.method, wanted, pack(asked)))
            with _BUILDING:
                executor.close()

    def send(
        self, call: Call[Any], arguments: Mapping[int, Arguments], wanted: Collection[int], seconds: float | None
    ) -> Replies:
        replies = _ThreadReplies(arguments)
        self._calls.put((call, arguments[0], 0 in wanted, replies))
        return replies

    def close(self) -> None:
        self._calls.put(None)
        self._thread.join(JOIN_SECONDS)
        assert not self._thread.is_alive(), "a worker hangs"


class _ThreadReplies(Replies):
    def __init__(self, ranks: Collection[int]) -> None:
        super().__init__(ranks)
        self._arrived: deque[PackedMessage | Failure] = deque()

    def record(self, result: PackedMessage | Failure) -> None:
        with _ARRIVED:
            self._arrived.append(result)
            _ARRIVED.notify_all()

    def receive(self, timeout: float | None) -> tuple[int, Failure] | None:
        with _ARRIVED:
            if not _ARRIVED.wait_for(lambda: self._arrived, timeout):
                return None
            result = self._arrived.popleft()
        if isinstance(result, Failure):
            return 0, result
        self.add(0, unpack(result), 0.0)
        return None

    @staticmethod
    def wait(several: Sequence[Any], timeout: float | None) -> Collection[Any]:
        with _ARRIVED:
            _ARRIVED.wait_for(lambda: any(one._arrived for one in several), timeout)
            return [one for one in several if one._arrived]
