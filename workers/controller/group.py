"""Worker groups: the same class on many ranks, called together by method name. Independent of what the workers compute."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

from workers.controller.dispatch import Call, Mesh, Sharded, collect, split
from workers.controller.process_inspection import RankState
from workers.controller.resource_pool import ResourcePool

REPORTED_RANKS = 4  # number of late ranks whose logs and stacks a PhaseTimeout quotes


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Position of a worker in its group; the first argument of its constructor.

    local_rank: its slot on the node; on CUDA the index of its device among those it sees. master_addr, master_port: a free
    port on rank 0's node.
    """

    rank: int
    world_size: int
    local_rank: int
    node_rank: int
    master_addr: str
    master_port: int


class WorkerError(RuntimeError):
    """A rank failed in ``method`` (``__init__``: its constructor), or its process died. Other ranks may still be running."""

    def __init__(self, rank: int, method: str, message: str, remote_traceback: str = "") -> None:
        super().__init__(rank, method, message, remote_traceback)
        self.rank = rank
        self.method = method
        self.message = message
        self.remote_traceback = remote_traceback

    @property
    def kind(self) -> str:
        """Class name of the worker's exception; no class name if its process died."""
        return self.message.partition(":")[0]

    def __str__(self) -> str:
        return "\n".join(filter(None, (f"rank {self.rank} failed in {self.method}: {self.message}", self.remote_traceback)))


class PhaseTimeout(TimeoutError):
    """``method`` exceeded its time limit.

    missing: ranks without a result. seconds: the limit. last_words: what is known of these ranks, for the user.
    """

    def __init__(self, method: str, missing: Sequence[int], seconds: float, last_words: str = "") -> None:
        super().__init__(method, missing, seconds, last_words)
        self.method = method
        self.missing = list(missing)
        self.seconds = seconds
        self.last_words = last_words
        self.states: list[RankState] = []
        """State of all ranks when the limit passed."""

    def __str__(self) -> str:
        said = f"{self.method} took more than {self.seconds:g} s"
        if self.missing:
            said += f": no answer from ranks {self.missing}"
        return "\n".join(filter(None, (said, self.last_words)))


@dataclass
class Replies(ABC):
    """Results of one call, filled as they arrive.

    values: by rank. missing: ranks without a result. ended: by rank, when its result arrived, in seconds since 1970.
    """

    world_size: int
    values: list[Any] = field(init=False)
    missing: set[int] = field(init=False)
    ended: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.values = [None] * self.world_size
        self.missing = set(range(self.world_size))
        self.ended = [0.0] * self.world_size

    def came(self, rank: int, value: Any, at: float) -> None:
        """Record the result of a rank. at: when it arrived, in seconds since 1970."""
        self.values[rank] = value
        self.missing.remove(rank)
        self.ended[rank] = at

    @abstractmethod
    def receive(self, timeout: float | None) -> None:
        """Record what has arrived; wait at most ``timeout`` seconds for at least one result. Raises WorkerError."""

    def examine(self) -> list[RankState]:
        """Current state of every rank, also of those with a result. Empty if the workers run in this process."""
        return []


class Transport(Protocol):
    """Connection from a group to its workers; each backend has its own."""

    def send(self, method: str, calls: Sequence[Call], wanted: Sequence[bool], timeout: float | None) -> Replies:
        """Start a call on every rank.

        calls: arguments by rank. wanted: by rank, whether its result is used; the others return None. timeout: seconds after
        which a backend that cannot abandon the call reports where it is.
        """

    def close(self) -> None:
        """End the workers."""


class Future:
    """Result of a call that may still be running. Its error is lost if ``result`` is never called."""

    def __init__(
        self, method: str, replies: Replies, mesh: Mesh | None, timeout: float | None, begun: float | None = None
    ) -> None:
        """begun: when the call was made, in seconds since 1970; None: now."""
        self.begun = time.time() if begun is None else begun
        self._method = method
        self._replies = replies
        self._mesh = mesh
        self._timeout = timeout
        self._started = time.monotonic()
        self._error: WorkerError | None = None

    @property
    def ended(self) -> list[float]:
        """By rank, when its result arrived, in seconds since 1970; 0: not yet."""
        return self._replies.ended

    def done(self) -> bool:
        """Whether ``result`` would return, or raise, without waiting."""
        self._receive(0.0)
        return self._error is not None or not self._replies.missing

    def result(self, timeout: float | None = None) -> list[Any]:
        """Wait for the results: a list by shard for a call with a mesh, else by rank.

        Raises WorkerError as soon as any rank has failed, without waiting for the others: they may hang in a collective.
        Raises PhaseTimeout after ``timeout`` seconds from now or when the call's own limit passes, whichever is first.
        """
        limits = [(self._started + self._timeout, self._timeout)] if self._timeout is not None else []
        limits += [(time.monotonic() + timeout, timeout)] if timeout is not None else []
        deadline, seconds = min(limits, default=(None, 0.0))
        while self._replies.missing and self._error is None:
            remaining = None if deadline is None else deadline - time.monotonic()
            self._receive(None if remaining is None else max(remaining, 0.0))
            # The deadline is checked after receiving: a result that has arrived by then is not late.
            if self._replies.missing and self._error is None and remaining is not None and remaining <= 0:
                raise self._late(seconds)
        if self._error is not None:
            raise self._error
        return collect(self._mesh, self._replies.values) if self._mesh else list(self._replies.values)

    def examine(self) -> list[RankState]:
        """Current state of every rank, also of those with a result."""
        return self._replies.examine()

    def _late(self, seconds: float) -> PhaseTimeout:
        """PhaseTimeout with the state of all ranks, and the logs and stacks of the first TOLD_RANKS that are late."""
        states = self.examine()
        missing = sorted(self._replies.missing)
        words = "\n".join(filter(None, (state.words() for state in states if state.rank in missing[:REPORTED_RANKS])))
        late = PhaseTimeout(self._method, missing, seconds, words)
        late.states = states
        return late

    def _receive(self, timeout: float | None) -> None:
        """Record what has arrived. An error is stored: ``done`` must not raise, and every call of ``result`` must."""
        if self._replies.missing and self._error is None:
            try:
                self._replies.receive(timeout)
            except WorkerError as error:
                self._error = error


class WorkerGroup:
    """One worker on each rank of a pool. Calls on one group run in the order in which they were made.

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

    def call(self, method: str, /, *args: Any, mesh: str | None = None, timeout: float | None = None, **kwargs: Any) -> Future:
        """Call ``method`` on every rank; returns at once.

        Without a mesh all arguments go to all ranks, and the result is a list by rank. With a mesh, Sharded arguments are
        split and the result is a list by shard. timeout: seconds from now, including the time behind earlier calls. Raises
        ValueError if the arguments do not fit the mesh, RuntimeError after shutdown.
        """
        if not self._open:
            raise RuntimeError(f"{method} was called on group {self.name!r} after its shutdown")
        begun = time.time()
        if mesh is None:
            sharded = [name for name, value in (*enumerate(args), *kwargs.items()) if isinstance(value, Sharded)]
            if sharded:
                raise ValueError(f"{method}: arguments {sharded} are Sharded, but the call names no mesh")
            replies = self._transport.send(method, [(args, kwargs)] * self.world_size, [True] * self.world_size, timeout)
            return Future(method, replies, None, timeout, begun)
        if mesh not in self._meshes:
            raise ValueError(f"{method}: group {self.name!r} has no mesh {mesh!r}, only {sorted(self._meshes)}")
        chosen = self._meshes[mesh]
        try:
            calls = split(chosen, args, kwargs)
        except ValueError as error:
            raise ValueError(f"{method} on mesh {mesh!r}: {error}") from None
        # The other ranks of a shard hold the same result: it is not sent.
        wanted = [rank in chosen.output_ranks for rank in range(self.world_size)]
        return Future(method, self._transport.send(method, calls, wanted, timeout), chosen, timeout, begun)

    def shutdown(self) -> None:
        """End the workers, whatever they are doing, and release their slots."""
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

        worker: a class, or its name "package.module:Class" (the controller does not import it). Its ``close()`` is called at
        shutdown where its process continues. env: set before the worker is imported. If a constructor fails, every call on
        the group raises WorkerError with method ``__init__``. Raises ValueError, with the arithmetic, if there are not enough
        slots.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """End all groups, and everything else that the backend started. May be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.shutdown()
