"""The worker's side of a call: unpack, call by name, pack. The same on Ray and in this process."""

from __future__ import annotations

import pkgutil
import random
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from operator import methodcaller
from typing import Any

from workers.controller.dispatch import Call
from workers.controller.group import WorkerError, WorkerInfo
from workers.controller.wire import Parcel, pack, unpack


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
            named = unpack(worker)
            args, kwargs = unpack_call(names, parcels)
            self.worker = (pkgutil.resolve_name(named) if isinstance(named, str) else named)(info, *args, **kwargs)

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


def free_port() -> int:
    """A port that nobody holds, below those that the kernel hands out: no connection takes it before we do."""
    draw = random.SystemRandom()
    while True:
        port = draw.randrange(20000, 32768)
        with socket.socket() as trial:
            try:
                trial.bind(("", port))
            except OSError:  # taken
                continue
        return port
