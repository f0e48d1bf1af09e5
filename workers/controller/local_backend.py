"""Workers as objects in this process, called one after the other: for tests, and for a debugger with one worker."""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from workers.controller.actor import Failure, Shell, hold_port, pack_call
from workers.controller.dispatch import Call
from workers.controller.environment import set_environment
from workers.controller.group import Backend, Replies, Transport, WorkerError, WorkerGroup, WorkerInfo
from workers.controller.logs import USERS
from workers.controller.resource_pool import ResourcePool
from workers.controller.wire import Parcel, pack, unpack


class LocalBackend(Backend):
    """A call has ended when it returns: futures are done. A timeout interrupts nothing, for one may sit in a debugger; when it is
    over, this process's stacks go to stderr.

    Arguments and results are packed and unpacked as on Ray, so nothing is shared that would not be shared there, and what
    cannot travel fails here too. Several workers cannot meet in a collective: they run one after the other. ``env`` is set in
    this process until shutdown; what is read when a library is loaded has been read.
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
        shells = [Shell() for _ in range(pool.world_size)]
        port = self._opened.enter_context(hold_port()).getsockname()[1]
        names, parcels = pack_call((args, kwargs), pack)
        for rank, shell in enumerate(shells):
            node, local_rank = pool.place(rank)
            info = WorkerInfo(rank, pool.world_size, local_rank, node, "127.0.0.1", port)
            if isinstance(shell.start(info, pack(worker), names, *parcels), Failure):
                break
        group = WorkerGroup(name, pool.world_size, _LocalTransport(shells))
        self._opened.callback(group.shutdown)
        return group

    def shutdown(self) -> None:
        self._opened.close()


class _LocalTransport(Transport):
    def __init__(self, shells: list[Shell]) -> None:
        self._shells = shells

    def send(self, method: str, calls: Sequence[Call], wanted: Sequence[bool], timeout: float | None) -> Replies:
        replies = _LocalReplies(len(self._shells))
        with stacks_after(timeout):
            for rank, (shell, call) in enumerate(zip(self._shells, calls, strict=True)):
                names, parcels = pack_call(call, pack)
                if not replies.take(rank, shell.call(method, wanted[rank], names, *parcels)):
                    break
        return replies

    def close(self) -> None:
        for shell in self._shells:
            shell.close()


@contextmanager
def stacks_after(seconds: float | None) -> Iterator[None]:
    """If the block takes longer, the stacks of all threads go to stderr, whatever the block does, and it goes on."""
    if seconds is None:
        yield
        return
    faulthandler.dump_traceback_later(seconds, file=USERS[-1])
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


class _LocalReplies(Replies):
    error: WorkerError | None = None

    def take(self, rank: int, answer: Parcel | Failure) -> bool:
        """Whether the rank succeeded."""
        if isinstance(answer, Failure):
            self.error = answer.raised(rank)
            return False
        self.came(rank, unpack(answer), time.time())
        return True

    def receive(self, timeout: float | None) -> None:
        if self.error:
            raise self.error
