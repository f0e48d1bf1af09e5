"""Workers as objects in this process, called one after the other: for tests, and for a debugger with one worker."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from math import inf
from typing import Any

from workers.controller.environment import set_environment
from workers.controller.group import Backend, Replies, Transport, WorkerGroup, WorkerInfo
from workers.controller.logs import USERS
from workers.controller.ports import hold_port
from workers.controller.resource_pool import ResourcePool
from workers.controller.rpc import Arguments, Call, Executor, Failure, PackedMessage, pack, unpack
from workers.controller.stacks import own_stacks


class LocalBackend(Backend):
    """Backend without processes: a call has ended when it returns, so its future is done.

    A timeout interrupts nothing, because the call may have stopped in a debugger: when it passes, the stacks of this process
    go to stderr. Arguments and results are packed and unpacked as on Ray: nothing is shared that would not be shared there,
    and a value that cannot be sent fails here too. Several workers cannot take part in a collective, because they run one
    after the other. ``env`` is set in this process until shutdown; a library that is already loaded has read its variables
    before.
    """

    def __init__(self) -> None:
        self._opened = ExitStack()

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
        self._opened.enter_context(set_environment(env or {}))
        executors = [Executor() for _ in range(pool.world_size)]
        # Held until shutdown, so that the port stays free for the workers.
        port = self._opened.enter_context(hold_port()).getsockname()[1]
        arguments = pack((args, kwargs))
        for rank, executor in enumerate(executors):
            node, local_rank = pool.place(rank)
            info = WorkerInfo(rank, pool.world_size, local_rank, node, "127.0.0.1", port, pool.n_parts)
            # Every call on the group now reports this failure: the other ranks need not be built.
            if isinstance(executor.start(info, pack(worker), arguments), Failure):
                break
        group = WorkerGroup(name, pool.world_size, _LocalTransport(executors))
        self._opened.callback(group.shutdown)
        return group

    def shutdown(self) -> None:
        self._opened.close()


class _LocalTransport(Transport):
    def __init__(self, executors: Sequence[Executor]) -> None:
        self._executors = executors

    def send(
        self, call: Call[Any], arguments: Mapping[int, Arguments], wanted: Collection[int], seconds: float | None
    ) -> Replies:
        replies = _LocalReplies(arguments)
        with stacks_after(seconds):
            for rank, own in arguments.items():
                result = self._executors[rank].call(call.role, call.method, rank in wanted, pack(own))
                # A call fails as soon as one rank has failed.
                if not replies.record(rank, result):
                    break
        return replies

    def close(self) -> None:
        for executor in self._executors:
            executor.close()


@contextmanager
def stacks_after(seconds: float | None) -> Iterator[None]:
    """If the block takes longer, write the stacks of all threads to stderr; the block is not interrupted."""
    if seconds is None:
        yield
        return
    block = _LATE_BLOCKS.enter(seconds)
    try:
        yield
    finally:
        _LATE_BLOCKS.leave(block)


class _LateBlocks:
    """Thread that reports the blocks of ``stacks_after`` that take longer than their limits.

    One thread for all blocks: starting one for each takes longer than a short call. A block wakes the thread only if its limit
    passes before that of an earlier block, so blocks that end in time cost nothing here.
    """

    # Not faulthandler.dump_traceback_later: its thread reads frames that change meanwhile, which can crash the run.

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open: dict[object, tuple[float, float]] = {}
        """By block: time.monotonic() at which its limit passes, and the limit in seconds."""
        self._wakes_at = inf
        self._started = False

    def enter(self, seconds: float) -> object:
        """Start the time of a block; returns its handle for ``leave``."""
        block, late_at = object(), time.monotonic() + seconds
        with self._changed:
            self._open[block] = late_at, seconds
            if not self._started:
                self._started = True
                threading.Thread(target=self._report, daemon=True).start()
            if late_at < self._wakes_at:
                self._changed.notify()
        return block

    def leave(self, block: object) -> None:
        """End a block, which may have been reported."""
        with self._changed:
            self._open.pop(block, None)

    def _report(self) -> None:
        with self._changed:
            while True:
                now = time.monotonic()
                for block, (late_at, seconds) in list(self._open.items()):
                    if late_at <= now:
                        del self._open[block]
                        # USERS: stderr itself may be redirected to a log, see chatter_to.
                        os.write(USERS[-1], f"Timeout ({timedelta(seconds=seconds)})!\n{own_stacks()}".encode())
                self._wakes_at = min((late_at for late_at, _ in self._open.values()), default=inf)
                self._changed.wait(None if self._wakes_at == inf else self._wakes_at - now)


_LATE_BLOCKS = _LateBlocks()


class _LocalReplies(Replies):
    failed: tuple[int, Failure] | None = None

    def record(self, rank: int, result: PackedMessage | Failure) -> bool:
        """Record the result or failure of a rank. Returns whether it succeeded."""
        if isinstance(result, Failure):
            self.failed = rank, result
            return False
        self.add(rank, unpack(result), time.time())
        return True

    def receive(self, timeout: float | None) -> tuple[int, Failure] | None:
        return self.failed

    @staticmethod
    def wait(several: Sequence[Any], timeout: float | None) -> Sequence[Any]:
        return several  # every local call has ended
