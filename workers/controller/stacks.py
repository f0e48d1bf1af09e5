"""Python stacks that others can ask for: a signal makes a process write them, whatever it does just then."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SIGNAL = signal.SIGRTMIN + 5  # libraries leave those of real time alone; it ends a process that has no handler for it
_NAME = "tandem-stacks-{pid}"  # with the id, so that a forked child is not taken for its parent
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x.*$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Frame:
    file: str
    line: int
    function: str


@cache
def answer_for_stacks() -> None:
    """From now on SIGNAL makes this process write the stacks of all its threads into memory of its own that others can read.

    The handler is C code: it answers also while an extension holds the interpreter's lock. A process that is stopped does not.
    """
    faulthandler.register(SIGNAL, file=os.memfd_create(_NAME.format(pid=os.getpid())), all_threads=True, chain=False)


def memory_of_stacks(pid: int) -> Path | None:
    """Where the process writes its stacks, if it answers for them."""
    wanted = f"/memfd:{_NAME.format(pid=pid)} (deleted)"
    try:
        return next((Path(entry.path) for entry in os.scandir(f"/proc/{pid}/fd") if os.readlink(entry.path) == wanted), None)
    except OSError:  # it is gone, or another user's
        return None


def frames_by_thread(stacks: str) -> list[list[Frame]]:
    """Of each thread its frames, the innermost first; the main thread comes last."""
    return [
        [Frame(file, int(line), function) for file, line, function in _FRAME.findall(part)] for part in _THREAD.split(stacks)[1:]
    ]
