"""Worker side of a call: unpack the arguments, call the method by name, pack the result. The same for all backends."""

from __future__ import annotations

import pkgutil
import random
import socket
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from typing import Any

from workers.controller.dispatch import Call
from workers.controller.group import WorkerError, WorkerInfo
from workers.controller.wire import PackedMessage, pack, unpack
from workers.start_times import START

PORTS_OF_CONNECTIONS = Path("/proc/sys/net/ipv4/ip_local_port_range")  # ports of outgoing connections, chosen by the kernel
RANK_PORTS = range(20000, 30000)


@dataclass(frozen=True, slots=True)
class Failure:
    """Failure of a call in a worker.

    message: "<class>: <text>" of the exception. traceback: as formatted in the worker. error: the exception itself if the
    caller is in the same process, else None.
    """

    method: str
    message: str
    traceback: str
    error: BaseException | None

    def raised(self, rank: int) -> WorkerError:
        """The WorkerError for the controller, chained to the exception if it is available."""
        failed = WorkerError(rank, self.method, self.message, self.traceback)
        failed.__cause__ = self.error
        return failed


class WorkerActor:
    """Holds one worker and executes packed calls on it.

    Each argument is a parcel of its own, so that an argument for many ranks is packed only once.
    """

    def __init__(self) -> None:
        self.worker: Any = None
        # Failure of the constructor, returned by every later call: an error of ``start`` itself may never be read, because a
        # group is usable while its workers are being built.
        self._stillborn: Failure | None = None

    def start(
        self, info: WorkerInfo, worker: PackedMessage, names: tuple[str, ...], *messages: PackedMessage
    ) -> PackedMessage | Failure:
        """Import and construct the worker.

        worker: the packed class, or its name "package.module:Class". names: keywords of the last len(names) parcels; the
        parcels before them are positional arguments.
        """

        def build() -> None:
            START.take()  # discards the times of an earlier worker in this process
            named = unpack(worker)
            args, kwargs = unpack_call(names, messages)
            with START("imports"):
                kind = pkgutil.resolve_name(named) if isinstance(named, str) else named
            self.worker = kind(info, *args, **kwargs)

        answer = guarded("__init__", build)
        self._stillborn = answer if isinstance(answer, Failure) else None
        return answer

    def call(self, method: str, wanted: bool, names: tuple[str, ...], *messages: PackedMessage) -> PackedMessage | Failure:
        """Call a method of the worker and pack its result.

        wanted: whether the result of this rank is used; if not, None is packed instead of it.
        """
        if self._stillborn:
            return self._stillborn

        def work() -> Any:
            args, kwargs = unpack_call(names, messages)
            result = methodcaller(method, *args, **kwargs)(self.worker)
            return result if wanted else None

        return guarded(method, work)

    def close(self) -> None:
        """Close the worker, so that it leaves what it shares with other workers. Needed where the process continues."""
        if self.worker is not None:
            self.worker.close()


def guarded(method: str, work: Callable[[], Any]) -> PackedMessage | Failure:
    """Call ``work`` and pack its result, or return a Failure.

    Catches SystemExit too: sys.exit in a library must not end a rank without a message.
    """
    try:
        return pack(work())
    except (Exception, SystemExit) as error:
        return Failure(method, f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)), error)


def pack_call(call: Call, ship: Callable[[Any], Any]) -> tuple[tuple[str, ...], list[Any]]:
    """(keywords, parcels) of one rank's arguments. ship: converts one argument to its parcel."""
    args, kwargs = call
    return tuple(kwargs), [ship(value) for value in (*args, *kwargs.values())]


def unpack_call(names: tuple[str, ...], messages: tuple[PackedMessage, ...]) -> Call:
    """Inverse of ``pack_call``: (positional arguments, keyword arguments)."""
    values = [unpack(message) for message in messages]
    n_positional = len(values) - len(names)
    return tuple(values[:n_positional]), dict(zip(names, values[n_positional:], strict=True))


def hold_port() -> socket.socket:
    """Reserve a free port: returns a bound socket that holds it until it is closed.

    No other process can bind the port or get it for a connection meanwhile. A listener that sets SO_REUSEADDR, as
    socket.create_server and torch's stores do, can still be opened on it.
    """
    low, high = map(int, PORTS_OF_CONNECTIONS.read_text().split())
    ports = ports_outside(low, high)
    while True:
        held = socket.socket()
        try:
            held.bind(("", random.SystemRandom().choice(ports)))
        except OSError:  # the port is in use
            held.close()
            continue
        # Only after bind: set before it, two holders could share a port.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return held


def ports_outside(low: int, high: int) -> Sequence[int]:
    """Candidate ports for ranks, without low ... high, the range in which the kernel opens connections.

    All are above the ports of Ray's workers and below Kubernetes' NodePorts (30000). If none would be left, the range is not
    excluded.
    """
    return [port for port in RANK_PORTS if not low <= port <= high] or RANK_PORTS


def free_port() -> int:
    """A port that was free a moment ago; for tests and benchmarks. Programs keep the socket of ``hold_port`` instead."""
    with hold_port() as held:
        return int(held.getsockname()[1])
