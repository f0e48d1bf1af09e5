"""What a worker writes: a file for each rank, and the last lines of it."""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from pathlib import Path

LOG_TAIL = 30  # lines: a crash prints the stack of its thread


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
    """Of the last process that wrote into a log."""
    if path is None or not path.is_file():
        return ()
    said = path.read_text(errors="replace").rpartition("--- process ")[2]
    return tuple(said.splitlines()[1:][-LOG_TAIL:])
