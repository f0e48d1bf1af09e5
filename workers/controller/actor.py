"""The worker's side of a call: unpack, call by name, pack. The same on Ray and in this process."""

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
from workers.controller.wire import Parcel, pack, unpack
from workers.start_times import START

PORTS_OF_CONNECTIONS = Path("/proc/sys/net/ipv4/ip_local_port_range")
RANK_PORTS = range(20000, 30000)


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong in a worker. error: the exception itself, where the caller is in the same process."""

    method: str
    message: str
    traceback: str
    error: BaseException | None

    def raised(self, rank: int) -> WorkerError:
        failed = WorkerError(rank, self.method, self.message, self.traceback)
        failed.__cause__ = self.error
        return failed


class Shell:
    """Holds one worker. Arguments come as parcels, one each, so that one that goes to many ranks is packed once."""

    def __init__(self) -> None:
        self.worker: Any = None
        self._stillborn: Failure | None = None

    def start(self, info: WorkerInfo, worker: Parcel, names: tuple[str, ...], *parcels: Parcel) -> Parcel | Failure:
        """Import and build the worker. names: the last parcels are arguments by these names."""

        def build() -> None:
            START.take()  # of a worker that was in this process before
            named = unpack(worker)
            args, kwargs = unpack_call(names, parcels)
            with START("imports"):
                kind = pkgutil.resolve_name(named) if isinstance(named, str) else named
            self.worker = kind(info, *args, **kwargs)

        answer = guarded("__init__", build)
        self._stillborn = answer if isinstance(answer, Failure) else None
        return answer

    def call(self, method: str, wanted: bool, names: tuple[str, ...], *parcels: Parcel) -> Parcel | Failure:
        """Call the worker's method; None instead of its result where that is not wanted."""
        if self._stillborn:
            return self._stillborn

        def work() -> Any:
            args, kwargs = unpack_call(names, parcels)
            result = methodcaller(method, *args, **kwargs)(self.worker)
            return result if wanted else None

        return guarded(method, work)

    def close(self) -> None:
        """Let the worker leave what it shares with others, where its process lives on."""
        if self.worker is not None:
            self.worker.close()


def guarded(method: str, work: Callable[[], Any]) -> Parcel | Failure:
    """The packed result, or what went wrong. SystemExit too: a library's sys.exit must not end a rank without a word."""
    try:
        return pack(work())
    except (Exception, SystemExit) as error:
        return Failure(method, f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)), error)


def pack_call(call: Call, ship: Callable[[Any], Any]) -> tuple[tuple[str, ...], list[Any]]:
    """(names, parcels) of one rank's arguments. ship: makes the parcel of one."""
    args, kwargs = call
    return tuple(kwargs), [ship(value) for value in (*args, *kwargs.values())]


def unpack_call(names: tuple[str, ...], parcels: tuple[Parcel, ...]) -> Call:
    values = [unpack(parcel) for parcel in parcels]
    n_positional = len(values) - len(names)
    return tuple(values[:n_positional]), dict(zip(names, values[n_positional:], strict=True))


def hold_port() -> socket.socket:
    """A bound socket that reserves its port until it is closed: no other process's bind or connection gets the port, while a
    listener that sets SO_REUSEADDR, as socket.create_server and torch's stores do, can still be opened on it.
    """
    low, high = map(int, PORTS_OF_CONNECTIONS.read_text().split())
    ports = ports_outside(low, high)
    while True:
        held = socket.socket()
        try:
            held.bind(("", random.SystemRandom().choice(ports)))
        except OSError:  # taken
            held.close()
            continue
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # after the bind: before it, two holders could share a port
        return held


def ports_outside(low: int, high: int) -> Sequence[int]:
    """Ports above those of Ray's workers and below Kubernetes' NodePorts (30000), without low ... high, where the kernel opens
    connections; with them if none would be left."""
    return [port for port in RANK_PORTS if not low <= port <= high] or RANK_PORTS


def free_port() -> int:
    """A port that was free a moment ago. For tests and benchmarks; a program keeps what ``hold_port`` returns."""
    with hold_port() as held:
        return int(held.getsockname()[1])
