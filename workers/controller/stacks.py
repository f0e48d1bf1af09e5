"""Python stacks on request: a signal makes a process write them, whatever it is doing."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SIGNAL = signal.SIGRTMIN + 5  # a real-time signal: libraries do not use them. It ends a process that has no handler for it
_NAME = "tandem-stacks-{pid}"  # with the pid: a forked child inherits the file and must not be taken for its parent
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x.*$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of a Python stack."""

    file: str
    line: int
    function: str


@cache
def enable_stack_reports() -> None:
    """Let SIGNAL make this process write the stacks of all its threads to anonymous memory that others can read.

    The handler is C code: it also answers while an extension holds the GIL. A process that is stopped does not answer.
    """
    faulthandler.register(SIGNAL, file=os.memfd_create(_NAME.format(pid=os.getpid())), all_threads=True, chain=False)


def own_stacks() -> str:
    """Stacks of all threads of this process, in the format of the reports.

    The handler of SIGNAL reads the frames of threads that run meanwhile, which can crash the process. Here no other thread
    executes Python: the caller holds the GIL throughout.
    """
    with os.fdopen(os.memfd_create("tandem-own-stacks"), "rb") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")


def memory_of_stacks(pid: int) -> Path | None:
    """File to which a process writes its stacks; None if it does not answer for them."""
    wanted = f"/memfd:{_NAME.format(pid=pid)} (deleted)"
    try:
        return next((Path(entry.path) for entry in os.scandir(f"/proc/{pid}/fd") if os.readlink(entry.path) == wanted), None)
    except OSError:  # the process has ended, or belongs to another user
        return None


def frames_by_thread(stacks: str) -> list[list[Frame]]:
    """Frames of each thread, innermost first; the main thread comes last."""
    return [
        [Frame(file, int(line), function) for file, line, function in _FRAME.findall(part)] for part in _THREAD.split(stacks)[1:]
    ]
