"""Worker groups: the same class on many ranks, called together. Independent of what the workers compute."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from workers.controller.process_inspection import RankState
from workers.controller.resource_pool import ResourcePool
from workers.controller.rpc import Arguments, Call, Failure, Mesh, Sharded, split

QUOTED_RANKS = 4  # number of late ranks whose logs and stacks a PhaseTimeout quotes
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Position of a worker in its group; the first argument of its constructor.

    local_rank: its slot on the node; on CUDA the index of its device among those it sees. master_addr, master_port: a free
    port on rank 0's node. n_groups: number of groups of this size that share the pool's nodes, and their memory on CPU.
    """

    rank: int
    world_size: int
    local_rank: int
    node_rank: int
    master_addr: str
    master_port: int
    n_groups: int = 1


class WorkerError(RuntimeError):
    """A rank failed in ``phase`` (the name of the method if the call had none), or its process died. Others may be running.

    process_died: see Failure.
    """

    def __init__(self, rank: int, phase: str, message: str, remote_traceback: str = "", *, process_died: bool = False) -> None:
        super().__init__(rank, phase, message, remote_traceback)
        self.process_died = process_died
        self.rank = rank
        self.phase = phase
        self.message = message
        self.remote_traceback = remote_traceback

    @property
    def kind(self) -> str:
        """Class name of the worker's exception; no class name if its process died."""
        return self.message.partition(":")[0]

    def __str__(self) -> str:
        return "\n".join(filter(None, (f"rank {self.rank} failed in {self.phase}: {self.message}", self.remote_traceback)))


class PhaseTimeout(TimeoutError):
    """``phase`` exceeded its time limit.

    missing: ranks without a result. seconds: the limit. last_words: what is known of these ranks, for the user.
    """

    def __init__(self, phase: str, missing: Sequence[int], seconds: float, last_words: str = "") -> None:
        super().__init__(phase, missing, seconds, last_words)
        self.phase = phase
        self.missing = list(missing)
        self.seconds = seconds
        self.last_words = last_words
        self.states: list[RankState] = []
        """State of all ranks when the limit passed."""

    def __str__(self) -> str:
        line = f"{self.phase} took more than {self.seconds:g} s"
        if self.missing:
            line += f": no answer from ranks {self.missing}"
        return "\n".join(filter(None, (line, self.last_words)))


@dataclass(frozen=True, slots=True)
class Limit:
    """Time limit of a call. source: the setting that it comes from, quoted in messages: "timeouts.update=20"."""

    seconds: float
    source: str = ""

    def of(self, phase: str) -> str:
        """``phase`` with the source of its limit."""
        return f"{phase}, limited by {self.source}," if self.source else phase


class Replies(ABC):
    """Results of one call, filled as they arrive.

    values: by rank. missing: ranks without a result. ended: by rank, when its result arrived, in seconds since 1970.
    """

    def __init__(self, ranks: Collection[int]) -> None:
        """ranks: on which the call was made."""
        self.values: dict[int, Any] = {}
        self.missing = set(ranks)
        self.ended: dict[int, float] = {}

    def add(self, rank: int, value: Any, at: float) -> None:
        """Record the result of a rank. at: when it arrived, in seconds since 1970."""
        self.values[rank] = value
        self.missing.remove(rank)
        self.ended[rank] = at

    @abstractmethod
    def receive(self, timeout: float | None) -> tuple[int, Failure] | None:
        """Record what has arrived; wait at most ``timeout`` seconds for at least one result.

        Returns (rank, failure) to report if a rank has failed.
        """

    @staticmethod
    @abstractmethod
    def wait(several: Sequence[Any], timeout: float | None) -> Collection[Any]:
        """Wait until something has arrived for one of several calls of this kind, at most ``timeout`` seconds.

        Returns all calls for which something has arrived and was not received.
        """

    def examine(self) -> list[RankState]:
        """Current state of every rank, also of those with a result. Empty if the workers run in this process."""
        return []


class Transport(Protocol):
    """Connection from a group to its workers; each backend has its own."""

    def send(
        self, call: Call[Any], arguments: Mapping[int, Arguments], wanted: Collection[int], seconds: float | None
    ) -> Replies:
        """Start a call on some ranks. It runs after the calls that were sent to them before.

        arguments: by rank, on which the call is made. wanted: ranks whose result is used; the others return None. seconds: the
        limit, after which a backend that cannot abandon the call reports where it is. Raises TimeoutError if the arguments
        cannot be sent within it.
        """

    def close(self) -> None:
        """End the workers."""


class Future(Generic[R]):
    """Result of a call that may still be running. Its error is lost if ``result`` is never called."""

    def __init__(
        self,
        method: str,
        replies: Replies,
        answering: Sequence[int],
        *,
        phase: str | None = None,
        limit: Limit | None = None,
        begun: float,
    ) -> None:
        """answering: ranks that return the results, in their order. phase: for messages; None: the method.

        begun: when the call was made, in seconds since 1970.
        """
        self.replies = replies
        self.begun = begun
        self.deadline = inf if limit is None else time.monotonic() + limit.seconds
        """time.monotonic() at which the limit passes."""
        self._method = method
        self._answering = answering
        self._phase = phase
        self._limit = limit
        self._error: WorkerError | None = None

    def done(self) -> bool:
        """Whether ``result`` would return, or raise, without waiting."""
        self.receive()
        return self.ended

    @property
    def ended(self) -> bool:
        """Whether ``result`` would return, or raise, with what has been received so far."""
        return self._error is not None or not self.replies.missing or time.monotonic() >= self.deadline

    def receive(self) -> None:
        """Record what has arrived, without waiting."""
        self._receive(0.0)

    def result(self, timeout: float | None = None) -> list[R]:
        """Wait for the results: a list by shard for a call with a mesh, of one item for a replica, else by rank.

        Raises WorkerError as soon as any rank has failed, without waiting for the others: they may hang in a collective.
        Raises PhaseTimeout after ``timeout`` seconds from now or when the call's own limit passes, whichever is first.
        """
        deadline, limit = self.deadline, self._limit
        if timeout is not None and time.monotonic() + timeout < deadline:
            deadline, limit = time.monotonic() + timeout, Limit(timeout)
        while self.replies.missing and self._error is None:
            remaining = deadline - time.monotonic()
            self._receive(None if remaining == inf else max(remaining, 0.0))
            # The deadline is checked after receiving: a result that has arrived by then is not late.
            if self.replies.missing and self._error is None and remaining <= 0:
                assert limit is not None
                raise self._late(limit)
        if self._error is not None:
            raise self._error
        return [self.replies.values[rank] for rank in self._answering]

    def examine(self) -> list[RankState]:
        """Current state of every rank, also of those with a result."""
        return self.replies.examine()

    def _late(self, limit: Limit) -> PhaseTimeout:
        """PhaseTimeout with the state of all ranks, and the logs and stacks of the first QUOTED_RANKS that are late."""
        states = self.examine()
        missing = sorted(self.replies.missing)
        words = "\n".join(filter(None, (state.words() for state in states if state.rank in missing[:QUOTED_RANKS])))
        late = PhaseTimeout(limit.of(self._phase or self._method), missing, limit.seconds, words)
        late.states = states
        return late

    def _receive(self, timeout: float | None) -> None:
        """Record what has arrived. An error is stored: ``done`` must not raise, and every call of ``result`` must."""
        if self.replies.missing and self._error is None and (failed := self.replies.receive(timeout)):
            rank, failure = failed
            phase = self._phase or failure.method
            self._error = WorkerError(rank, phase, failure.message, failure.traceback, process_died=failure.process_died)
            self._error.__cause__ = failure.error


def wait_any(futures: Sequence[Future[R]], timeout: float | None = None) -> list[Future[R]]:
    """Wait until a future is done or its limit passes; returns all of these, in order. Empty after ``timeout`` seconds.

    The futures may be of several groups of one backend.
    """
    end = inf if timeout is None else time.monotonic() + timeout
    while True:
        if waiting := [future for future in futures if not future.ended]:
            some_ended = len(waiting) < len(futures)
            remaining = min(end, *(future.deadline for future in waiting)) - time.monotonic()
            patience = 0.0 if some_ended else None if remaining == inf else max(remaining, 0.0)
            # One request to the backend for all of them: asking for each would cost n^2 requests for the results of n calls.
            news = waiting[0].replies.wait([future.replies for future in waiting], patience)
            for future in waiting:
                if future.replies in news:
                    future.receive()
        done = [future for future in futures if future.ended]
        if done or not futures or time.monotonic() >= end:
            return done


class WorkerGroup:
    """One worker on each rank of a pool. Calls on one rank run in the order in which they were made.

    Arguments and results are copies: a worker or the caller may modify them without affecting the other side.
    """

    def __init__(self, name: str, world_size: int, transport: Transport) -> None:
        self.name = name
        self.world_size = world_size
        self._transport = transport
        self._meshes: dict[str, Mesh] = {}
        self._open = True

    def register_mesh(self, name: str, mesh: Mesh) -> None:
        """Name a mesh for ``call``. Raises ValueError if its world size is not the group's, or if the name is taken."""
        if mesh.world_size != self.world_size:
            raise ValueError(f"mesh {name!r} has {mesh.world_size} ranks, group {self.name!r} {self.world_size}")
        if name in self._meshes:
            raise ValueError(f"group {self.name!r} has a mesh {name!r} already")
        self._meshes[name] = mesh

    def call(
        self,
        call: Call[R],
        *,
        mesh: str | None = None,
        replica: int | None = None,
        phase: str | None = None,
        limit: Limit | None = None,
    ) -> Future[R]:
        """Start a call on every rank, or on those of one replica; returns at once.

        Without a mesh all arguments go to all ranks, and the result is a list by rank. With a mesh, Sharded arguments are
        split and the result is a list by shard. replica: only the ranks that hold this shard of the mesh are called, and the
        result has one item; calls on other replicas run concurrently. phase: what the workers do, for the messages of
        WorkerError and PhaseTimeout; None: the method's name. limit: counts from now, including the time behind earlier calls.

        Raises ValueError if the arguments do not fit the mesh, RuntimeError after shutdown, PhaseTimeout if the arguments
        cannot be sent.
        """
        if not self._open:
            raise RuntimeError(f"{call.method} was called on group {self.name!r} after its shutdown")
        arguments, answering = self._addressed(call, mesh, replica)
        begun = time.time()
        try:
            # The other ranks of a shard hold the same result: it is not sent.
            replies = self._transport.send(call, arguments, set(answering), None if limit is None else limit.seconds)
        except TimeoutError as error:
            assert limit is not None
            raise PhaseTimeout(limit.of(phase or call.method), sorted(arguments), limit.seconds, str(error)) from None
        return Future(call.method, replies, answering, phase=phase, limit=limit, begun=begun)

    def _addressed(self, call: Call[Any], mesh: str | None, replica: int | None) -> tuple[dict[int, Arguments], Sequence[int]]:
        """(arguments by rank, ranks that return the results)."""
        own: Arguments = (call.args, dict(call.kwargs))
        split_up = [name for name, value in (*enumerate(call.args), *call.kwargs.items()) if isinstance(value, Sharded)]
        if mesh is None:
            if split_up or replica is not None:
                what = f"arguments {split_up} are Sharded" if split_up else f"it is for replica {replica}"
                raise ValueError(f"{call.method}: {what}, but the call names no mesh")
            return dict.fromkeys(range(self.world_size), own), range(self.world_size)
        if mesh not in self._meshes:
            raise ValueError(f"{call.method}: group {self.name!r} has no mesh {mesh!r}, only {sorted(self._meshes)}")
        chosen = self._meshes[mesh]
        if replica is None:
            try:
                return dict(enumerate(split(chosen, *own))), chosen.output_ranks
            except ValueError as error:
                raise ValueError(f"{call.method} on mesh {mesh!r}: {error}") from None
        if not 0 <= replica < chosen.n_shards:
            raise ValueError(f"{call.method}: mesh {mesh!r} has {chosen.n_shards} shards, no replica {replica}")
        if split_up:
            raise ValueError(f"{call.method}: arguments {split_up} are Sharded, but the call is for replica {replica} alone")
        ranks = [rank for rank, shard in enumerate(chosen.shard_of_rank) if shard == replica]
        return dict.fromkeys(ranks, own), [chosen.output_ranks[replica]]

    def shutdown(self) -> None:
        """End the workers, whatever they are doing, and release their slots."""
        # Called twice if a part of a step has ended these workers: the backend's shutdown follows.
        if self._open:
            self._open = False
            self._transport.close()


class Backend(ABC):
    """Starts worker groups. As a context manager it ends every process of its own, however the block ends."""

    @abstractmethod
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
        """Start ``worker(WorkerInfo, *args, **kwargs)`` on each slot of the pool; returns while they are being built.

        worker: a class, or its name "package.module:Class" (it is imported by the worker's process). Its ``close()`` is called
        at shutdown where its process continues. env: set before the worker is imported. If a constructor fails, every call on
        the group raises WorkerError, with phase ``__init__`` unless the call has a phase. Raises ValueError, with the
        arithmetic, if there are not enough slots.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """End all groups, and everything else that the backend started. May be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.shutdown()
