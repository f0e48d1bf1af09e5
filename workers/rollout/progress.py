"""How far an engine is with the answers that it was asked for: a few numbers in a file, for whoever looks meanwhile."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path
from typing import NamedTuple

SECONDS = 0.1  # between writes
_NUMBERS = struct.Struct("<qqqd")


class Standing(NamedTuple):
    """done: answers that have ended, of ``asked``, with so many tokens. begun: seconds since 1970."""

    done: int
    asked: int
    tokens: int
    begun: float


class Progress:
    """The writing end. What it writes is read whole or not at all: one small write at a time."""

    def __init__(self, path: Path) -> None:
        path.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        self._asked, self._begun, self._next = 0, 0.0, 0.0

    def begin(self, asked: int) -> None:
        self._asked, self._begun = asked, time.time()
        self._write(0, 0)

    def tell(self, done: int, tokens: int) -> None:
        """Cheap enough for every step of an engine."""
        if done == self._asked or time.monotonic() >= self._next:
            self._write(done, tokens)

    def close(self) -> None:
        os.close(self._file)

    def _write(self, done: int, tokens: int) -> None:
        self._next = time.monotonic() + SECONDS
        os.pwrite(self._file, _NUMBERS.pack(done, self._asked, tokens, self._begun), 0)


def progress_file(run_dir: Path, engine: int) -> Path:
    return run_dir / "logs" / "progress" / f"engine_{engine}"


def read_progress(run_dir: Path) -> Standing:
    """Of all engines whose files are within reach, together; begun: the first of them."""
    files = (run_dir / "logs" / "progress").glob("engine_*")
    found = [_NUMBERS.unpack(told) for path in files if len(told := path.read_bytes()) == _NUMBERS.size]
    if not found:
        return Standing(0, 0, 0, 0.0)
    done, asked, tokens, begun = zip(*found, strict=True)
    return Standing(sum(done), sum(asked), sum(tokens), min(begun))
