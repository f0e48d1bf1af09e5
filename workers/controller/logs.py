"""Logs: a file with the output of each rank, a file with the output of the controller's libraries, lines to the user."""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

LOG_TAIL = 30  # lines; a crash prints the stack of its thread
NCCL_TIMEOUT = "Watchdog caught collective operation timeout"  # NCCL's watchdog then ends the process, with pages of C++ frames
USERS = [2]  # file descriptors; the last one is the user's stderr, where a dying process writes its stacks
_heard: list[TextIO] = []


def tell(line: str) -> None:
    """Print a line for the user on stderr, also while the stderr of libraries is redirected."""
    print(line, file=heard_where(), flush=True)


def announce(notices: Iterable[str | None]) -> None:
    """Print a warning for the user, ``note: ...``, for each notice that is not None."""
    for notice in notices:
        if notice is not None:
            tell(f"note: {notice}")


def heard_where() -> TextIO:
    """Stream that ``tell`` writes to."""
    return _heard[-1] if _heard else sys.stderr


@contextmanager
def heard_through(stream: TextIO) -> Iterator[None]:
    """Within the block ``tell`` writes to this stream, such as a display that keeps such lines apart from itself."""
    _heard.append(stream)
    try:
        yield
    finally:
        _heard.remove(stream)


@contextmanager
def chatter_to(path: Path) -> Iterator[None]:
    """Within the block, append the output of libraries and child processes to a file.

    Redirects file descriptors 1 and 2, thus also what Python writes to stderr, including logging and warnings. Python's
    stdout and ``tell`` still reach the user.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Buffered text belongs to the user: write it before the descriptors change.
    sys.stdout.flush()
    sys.stderr.flush()
    kept, stdout = [os.dup(1), os.dup(2)], sys.stdout
    # What Python prints to stdout is for the user, so it keeps writing to the original descriptor.
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
        # In reverse: buffered text belongs to the log, write it before the descriptors are restored.
        for stream in (sys.stdout, stdout, sys.stderr):
            stream.flush()
        sys.stdout = stdout
        USERS.pop()
        for number, descriptor in enumerate(kept, 1):
            os.dup2(descriptor, number)
            os.close(descriptor)


def _same_on(descriptor: int, number: int, stream: TextIO) -> TextIO:
    """Reopen ``stream`` on ``descriptor``. Returns it unchanged if it does not write to ``number``: it is being captured."""
    try:
        if stream.fileno() != number:
            return stream
    except (OSError, ValueError):  # io.UnsupportedOperation is a subclass of both
        return stream
    return open(descriptor, "w", buffering=1, encoding=stream.encoding, errors=stream.errors, closefd=False)


def write_to(path: Path) -> None:
    """Append all output of this process to a file, including that of C libraries and of a crash."""
    path.parent.mkdir(parents=True, exist_ok=True)  # on another node it may not exist yet
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, sys.stdout.fileno())
    os.dup2(descriptor, sys.stderr.fileno())
    os.close(descriptor)
    faulthandler.enable(all_threads=False)
    print(f"--- process {os.getpid()}, {time.strftime('%Y-%m-%d %H:%M:%S')}", flush=True)


def tail(path: Path | None) -> str:
    """Last lines of a dead worker's log, with a heading; "" if the file cannot be reached from here."""
    if path is None or not path.is_file():
        return ""
    return "\n".join([f"last lines of {path}:", *(last_lines(path) or ["(none)"])])


def last_lines(path: Path | None) -> tuple[str, ...]:
    """Last lines of the last process that wrote to a log. If NCCL's watchdog ended it, the reason comes first."""
    if path is None or not path.is_file():
        return ()
    text = path.read_text(errors="replace").rpartition("--- process ")[2]
    lines = text.splitlines()[1:]
    return (*[line for line in lines[:-LOG_TAIL] if NCCL_TIMEOUT in line][-1:], *lines[-LOG_TAIL:])
