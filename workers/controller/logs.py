"""What a worker writes: a file for each rank, and the last lines of it. What the controller says, and its libraries write."""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

LOG_TAIL = 30  # lines: a crash prints the stack of its thread
NCCL_TIMEOUT = "Watchdog caught collective operation timeout"  # NCCL's watchdog then ends the process, with pages of C++ frames
USERS = [2]  # descriptors, the last: where a process that is dying leaves its stacks
_heard: list[TextIO] = []


def tell(line: str) -> None:
    """A line to the user on stderr, wherever that of libraries goes."""
    print(line, file=heard_where(), flush=True)


def heard_where() -> TextIO:
    return _heard[-1] if _heard else sys.stderr


@contextmanager
def heard_through(stream: TextIO) -> Iterator[None]:
    """Within, ``tell`` writes to this stream: a display that keeps lines and itself apart."""
    _heard.append(stream)
    try:
        yield
    finally:
        _heard.remove(stream)


@contextmanager
def chatter_to(path: Path) -> Iterator[None]:
    """Within, what libraries and children write goes to the end of a file: descriptors 1 and 2, so also what Python writes to
    stderr, logging and warnings among it. Python's stdout, and ``tell``, still reach the user.
    """
    path.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.parent.mkdir(exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    kept, stdout = [os.dup(1), os.dup(2)], sys.stdout
    sys.stdout = _same_on(kept[0], 1, stdout)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(log, f"--- process {os.getpid()}, {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    USERS.append(kept[1])
    try:
        with heard_through(_same_on(kept[1], 2, sys.stderr)):
            yield
    finally:
        for stream in (sys.stdout, stdout, sys.stderr):
            stream.flush()
        sys.stdout = stdout
        USERS.pop()
        for number, descriptor in enumerate(kept, 1):
            os.dup2(descriptor, number)
            os.close(descriptor)


def _same_on(descriptor: int, number: int, stream: TextIO) -> TextIO:
    """The stream on a copy of its descriptor; itself if it does not write to ``number``, for somebody reads along."""
    try:
        if stream.fileno() != number:
            return stream
    except (OSError, ValueError):  # io.UnsupportedOperation is both
        return stream
    return open(descriptor, "w", buffering=1, encoding=stream.encoding, errors=stream.errors, closefd=False)


def write_to(path: Path) -> None:
    """This process's output, of C libraries and of a crash too, goes to the end of a file."""
    path.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # on another node it may not be there yet
    path.parent.mkdir(exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, sys.stdout.fileno())
    os.dup2(descriptor, sys.stderr.fileno())
    os.close(descriptor)
    faulthandler.enable(all_threads=False)
    print(f"--- process {os.getpid()}, {time.strftime('%Y-%m-%d %H:%M:%S')}", flush=True)


def tail(path: Path | None) -> str:
    """The last lines that a dead worker wrote, if its file is within reach."""
    if path is None or not path.is_file():
        return ""
    return "\n".join([f"last lines of {path}:", *(last_lines(path) or ["(none)"])])


def last_lines(path: Path | None) -> tuple[str, ...]:
    """Of the last process that wrote into a log. The reason for which NCCL's watchdog ended it comes first."""
    if path is None or not path.is_file():
        return ()
    said = path.read_text(errors="replace").rpartition("--- process ")[2]
    lines = said.splitlines()[1:]
    return (*[line for line in lines[:-LOG_TAIL] if NCCL_TIMEOUT in line][-1:], *lines[-LOG_TAIL:])
