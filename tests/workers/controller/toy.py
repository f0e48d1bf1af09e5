"""A worker without models, for both backends."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from workers.controller.group import WorkerInfo


class Toy:
    def __init__(self, info: WorkerInfo, *args: Any, fails_on: int | None = None, **kwargs: Any) -> None:
        if info.rank == fails_on:
            raise ValueError(f"rank {info.rank} fails on request")
        self.info = info
        self.given = (args, kwargs)
        self.calls: list[Any] = []

    def close(self) -> None:
        self.calls.append("closed")

    def stands(self) -> WorkerInfo:
        return self.info

    def built_with(self) -> tuple[Any, ...]:
        return self.given

    def environment(self, *names: str) -> list[str | None]:
        return [os.environ.get(name) for name in names]

    def pid(self) -> int:
        return os.getpid()

    def echo(self, *args: Any, **kwargs: Any) -> tuple[int, tuple[Any, ...], dict[str, Any]]:
        return self.info.rank, args, kwargs

    def same(self, value: Any) -> Any:
        return value

    def lock_unless(self, *ranks: int) -> Any:
        """Something that cannot be pickled, on ranks other than these."""
        return self.info.rank if self.info.rank in ranks else threading.Lock()

    def note(self, what: Any, pause: float = 0.0) -> int:
        time.sleep(pause)
        self.calls.append(what)
        return len(self.calls)

    def noted(self) -> list[Any]:
        return self.calls

    def spoil(self, value: Any) -> float:
        """Change the argument in place."""
        value += 1
        return float(value.sum())

    def fail(self, rank: int, hangs: bool = False) -> None:
        """``rank`` raises; the others return at once, or hang as in a collective."""
        if self.info.rank == rank:
            raise KeyError("no such thing")
        if hangs:
            time.sleep(600)

    def quit(self) -> None:
        sys.exit("a library called sys.exit")

    def die(self, rank: int, how: str) -> None:
        if self.info.rank != rank:
            time.sleep(600)
        print("last words")
        if how == "signal":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "crash":
            ctypes.string_at(0)
        os._exit(3)

    def die_later(self, rank: int, seconds: float) -> None:
        """The others fail at once, as ranks whose connection breaks."""
        if self.info.rank != rank:
            raise ConnectionError("connection closed by peer")
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    def hang(self, *ranks: int) -> str:
        """Hang on these ranks; on all, if none is given."""
        if not ranks or self.info.rank in ranks:
            time.sleep(600)
        return "done"

    def hang_with_lock(self, says: str = "") -> None:
        """Like a C extension that never releases the interpreter's lock."""
        print(says, flush=True)
        ctypes.PyDLL(None).sleep(600)

    def orphan(self) -> None:
        """Start a process without a parent here, which outlives this one unless it is killed."""
        subprocess.run(["sh", "-c", "setsid sleep 600 &"], check=True)
