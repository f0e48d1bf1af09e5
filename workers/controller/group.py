"""Worker groups: the same class on many ranks, called together by name. Knows nothing of what the workers do."""

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

TOLD_RANKS = 4  # of those that are late, so many are told of


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Where a worker stands: the first argument of its constructor. local_rank: its slot of the node, on CUDA its device among
    those it sees. master_addr, master_port: a free port on rank 0's node."""

    rank: int
    world_size: int
    local_rank: int
    node_rank: int
    master_addr: str
    master_port: int


class WorkerError(RuntimeError):
    """A rank failed in ``method`` (``__init__``: its constructor), or its process died. The other ranks may still be at it."""

    def __init__(self, rank: int, method: str, message: str, remote_traceback: str = "") -> None:
        super().__init__(rank, method, message, remote_traceback)
        self.rank = rank
        self.method = method
        self.message = message
        self.remote_traceback = remote_traceback

    @property
    def kind(self) -> str:
        """The class of what the worker raised; no class's name if its process died."""
        return self.message.partition(":")[0]

    def __str__(self) -> str:
        return "\n".join(filter(None, (f"rank {self.rank} failed in {self.method}: {self.message}", self.remote_traceback)))


class PhaseTimeout(TimeoutError):
    """Time ran out for ``method``. missing: the ranks that had not answered. last_words: what is known of them, for people."""

    def __init__(self, method: str, missing: Sequence[int], seconds: float, last_words: str = "") -> None:
        super().__init__(method, missing, seconds, last_words)
        self.method = method
        self.missing = list(missing)
        self.seconds = seconds
        self.last_words = last_words
        self.states: list[RankState] = []
        """Of all ranks, when time ran out."""

    def __str__(self) -> str:
        said = f"{self.method} took more than {self.seconds:g} s"
        if self.missing:
            said += f": no answer from ranks {self.missing}"
        return "\n".join(filter(None, (said, self.last_words)))


@dataclass
class Replies(ABC):
    """The answers to one call while they come in. values: by rank. missing: the ranks that have not answered. ended: when each
    rank's answer came, seconds since 1970."""

    world_size: int
    values: list[Any] = field(init=False)
    missing: set[int] = field(init=False)
    ended: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.values = [None] * self.world_size
        self.missing = set(range(self.world_size))
        self.ended = [0.0] * self.world_size

    def came(self, rank: int, value: Any, at: float) -> None:
        self.values[rank] = value
        self.missing.remove(rank)
        self.ended[rank] = at

    @abstractmethod
    def receive(self, timeout: float | None) -> None:
        """Take in what has arrived; wait for one answer at least, at most ``timeout`` seconds. Raises WorkerError."""

    def examine(self) -> list[RankState]:
        """What every rank is at just now, also those that have answered. Nothing where the ranks are this process."""
        return []


class Transport(Protocol):
    """What a backend lends a group: its way to the workers."""

    def send(self, method: str, calls: Sequence[Call], wanted: Sequence[bool], timeout: float | None) -> Replies:
        """Start a call on every rank. Ranks that are not wanted answer None. timeout: seconds after which a backend that cannot
        give the call up says where it is."""

    def close(self) -> None:
        """End the workers."""


class Future:
    """The result of a call that may still run. If nobody asks for it, its error stays unknown."""

    def __init__(
        self, method: str, replies: Replies, mesh: Mesh | None, timeout: float | None, begun: float | None = None
    ) -> None:
        """begun: when the call was made, seconds since 1970; None: now."""
        self.begun = time.time() if begun is None else begun
        self._method = method
        self._replies = replies
        self._mesh = mesh
        self._timeout = timeout
        self._started = time.monotonic()
        self._error: WorkerError | None = None

    @property
    def ended(self) -> list[float]:
        """When each rank's answer came, seconds since 1970; 0 if it has not."""
        return self._replies.ended

    def done(self) -> bool:
        """Whether result() would answer, or raise, at once."""
        self._receive(0.0)
        return self._error is not None or not self._replies.missing

    def result(self, timeout: float | None = None) -> list[Any]:
        """By shard for a call with a mesh, else by rank.

        Raises WorkerError as soon as any rank has failed, without waiting for the others: they may hang in a collective.
        Raises PhaseTimeout after ``timeout`` seconds from now, or when the call's own timeout is over, whichever is first.
        """
        limits = [(self._started + self._timeout, self._timeout)] if self._timeout is not None else []
        limits += [(time.monotonic() + timeout, timeout)] if timeout is not None else []
        deadline, seconds = min(limits, default=(None, 0.0))
        while self._replies.missing and self._error is None:
            remaining = None if deadline is None else deadline - time.monotonic()
            self._receive(None if remaining is None else max(remaining, 0.0))
            if self._replies.missing and self._error is None and remaining is not None and remaining <= 0:
                raise self._late(seconds)
        if self._error is not None:
            raise self._error
        return collect(self._mesh, self._replies.values) if self._mesh else list(self._replies.values)

    def examine(self) -> list[RankState]:
        """What every rank is at just now, also those that have answered."""
        return self._replies.examine()

    def _late(self, seconds: float) -> PhaseTimeout:
        states = self.examine()
        missing = sorted(self._replies.missing)
        words = "\n".join(filter(None, (state.words() for state in states if state.rank in missing[:TOLD_RANKS])))
        late = PhaseTimeout(self._method, missing, seconds, words)
        late.states = states
        return late

    def _receive(self, timeout: float | None) -> None:
        if self._replies.missing and self._error is None:
            try:
                self._replies.receive(timeout)
            except WorkerError as error:
                self._error = error


class WorkerGroup:
    """One worker on each rank of a pool. Calls on one group run in the order in which they were made.

    Arguments and results arrive as copies: a worker or the caller may change what it got, the other side keeps its own.
    """

    def __init__(self, name: str, world_size: int, transport: Transport) -> None:
        self.name = name
        self.world_size = world_size
        self._transport = transport
        self._meshes: dict[str, Mesh] = {}
        self._open = True

    def register_mesh(self, name: str, mesh: Mesh) -> None:
        """Raises ValueError if the mesh is of another world size or the name is taken."""
        if mesh.world_size != self.world_size:
            raise ValueError(f"mesh {name!r} has {mesh.world_size} ranks, group {self.name!r} {self.world_size}")
        if name in self._meshes:
            raise ValueError(f"group {self.name!r} has a mesh {name!r} already")
        self._meshes[name] = mesh

    def call(self, method: str, /, *args: Any, mesh: str | None = None, timeout: float | None = None, **kwargs: Any) -> Future:
        """Call ``method`` on every rank; returns at once.

        Without a mesh all arguments go to all ranks and the result is a list by rank. With one, Sharded arguments are
        split and the result is a list by shard. timeout: seconds from now, waiting behind earlier calls included.
        Raises ValueError if arguments do not fit the mesh.
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
        wanted = [rank in chosen.answers for rank in range(self.world_size)]
        return Future(method, self._transport.send(method, calls, wanted, timeout), chosen, timeout, begun)

    def shutdown(self) -> None:
        """End the workers, whatever they do just now, and give their slots back."""
        if self._open:
            self._open = False
            self._transport.close()


class Backend(ABC):
    """Starts groups. As a context manager it ends every process of its own, however the block ends."""

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
        """One ``worker(WorkerInfo, *args, **kwargs)`` on each slot of the pool; returns while they are being built.

        worker: "package.module:Class" (the controller does not import it) or a class; its ``close()`` is called at shutdown where
        its process lives on. env: set before it is imported.
        A constructor that fails makes every call on the group raise WorkerError with method ``__init__``.
        Raises ValueError, with the arithmetic, if there are not enough slots.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """End all groups and what the backend started. May be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.shutdown()
