"""Workers as objects in this process, called one after the other: for tests, and for a debugger with one worker."""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from workers.controller.actor import Failure, WorkerActor, hold_port, pack_call
from workers.controller.dispatch import Call
from workers.controller.environment import set_environment
from workers.controller.group import Backend, Replies, Transport, WorkerError, WorkerGroup, WorkerInfo
from workers.controller.logs import USERS
from workers.controller.resource_pool import ResourcePool
from workers.controller.wire import PackedMessage, pack, unpack


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
        shells = [WorkerActor() for _ in range(pool.world_size)]
        # Held until shutdown, so that the port stays free for the workers.
        port = self._opened.enter_context(hold_port()).getsockname()[1]
        names, messages = pack_call((args, kwargs), pack)
        for rank, shell in enumerate(shells):
            node, local_rank = pool.place(rank)
            info = WorkerInfo(rank, pool.world_size, local_rank, node, "127.0.0.1", port)
            # Every call on the group now reports this failure: the other ranks need not be built.
            if isinstance(shell.start(info, pack(worker), names, *messages), Failure):
                break
        group = WorkerGroup(name, pool.world_size, _LocalTransport(shells))
        self._opened.callback(group.shutdown)
        return group

    def shutdown(self) -> None:
        self._opened.close()


class _LocalTransport(Transport):
    def __init__(self, shells: list[WorkerActor]) -> None:
        self._actors = shells

    def send(self, method: str, calls: Sequence[Call], wanted: Sequence[bool], timeout: float | None) -> Replies:
        replies = _LocalReplies(len(self._actors))
        with stacks_after(timeout):
            for rank, (shell, call) in enumerate(zip(self._actors, calls, strict=True)):
                names, messages = pack_call(call, pack)
                if not replies.take(rank, shell.call(method, wanted[rank], names, *messages)):
                    break
        return replies

    def close(self) -> None:
        for shell in self._actors:
            shell.close()


@contextmanager
def stacks_after(seconds: float | None) -> Iterator[None]:
    """If the block takes longer, write the stacks of all threads to stderr; the block is not interrupted."""
    if seconds is None:
        yield
        return
    # USERS: stderr itself may be redirected to a log, see chatter_to.
    faulthandler.dump_traceback_later(seconds, file=USERS[-1])
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


class _LocalReplies(Replies):
    error: WorkerError | None = None

    def take(self, rank: int, answer: PackedMessage | Failure) -> bool:
        """Record the result or failure of a rank. Returns whether it succeeded."""
        if isinstance(answer, Failure):
            self.error = answer.raised(rank)
            return False
        self.came(rank, unpack(answer), time.time())
        return True

    def receive(self, timeout: float | None) -> None:
        if self.error:
            raise self.error
