"""Progress of a generation: each engine writes a few counters to a file that the display of the controller polls.

A generation is one long remote call, so the worker cannot report by its return value. A fixed-size record at offset 0 of a file
needs neither a lock nor a connection, and costs one system call per SECONDS.
"""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path
from typing import NamedTuple

SECONDS = 0.1  # minimum interval between writes
_RECORD = struct.Struct("<qqqd")


class ProgressCounts(NamedTuple):
    """done, requested: numbers of responses. tokens: total of the finished responses. started: seconds since 1970."""

    done: int
    requested: int
    tokens: int
    started: float


class Progress:
    """Writer of one engine's progress file. Each update is one small write, so a reader never sees half a record."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        self._requested, self._started, self._next = 0, 0.0, 0.0

    def begin(self, requested: int) -> None:
        """Start a generation of ``requested`` responses."""
        self._requested, self._started = requested, time.time()
        self._write(0, 0)

    def record(self, done: int, tokens: int) -> None:
        """Record progress; writes at most every SECONDS, and always the last response, so that every engine step may call it."""
        if done == self._requested or time.monotonic() >= self._next:
            self._write(done, tokens)

    def close(self) -> None:
        os.close(self._file)

    def _write(self, done: int, tokens: int) -> None:
        self._next = time.monotonic() + SECONDS
        os.pwrite(self._file, _RECORD.pack(done, self._requested, tokens, self._started), 0)


def progress_file(run_dir: Path, engine: int) -> Path:
    """Path of the progress file of engine number ``engine``."""
    return run_dir / "logs" / "progress" / f"engine_{engine}"


def read_progress(run_dir: Path) -> ProgressCounts:
    """Sum the progress of all engines whose files this machine can read; ``started`` is the earliest of them."""
    files = (run_dir / "logs" / "progress").glob("engine_*")
    # A file of another size was created a moment ago and not written yet.
    found = [_RECORD.unpack(data) for path in files if len(data := path.read_bytes()) == _RECORD.size]
    if not found:
        return ProgressCounts(0, 0, 0, 0.0)
    done, requested, tokens, started = zip(*found, strict=True)
    return ProgressCounts(sum(done), sum(requested), sum(tokens), min(started))
