"""Inspect local processes from outside: Python stacks, collectives, and the kernel's wait state of those that do not answer.

Python stacks are requested by a signal that C code answers, so a thread that holds the GIL reports its position too. A
process that is stopped, or is inside the kernel, cannot answer: reported are its state and the kernel function in which each
thread waits. No process is woken or ended for that.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import psutil

from workers.controller.flight_recorder import collectives_of
from workers.controller.stacks import SIGNAL, memory_of_stacks, own_stacks

ANSWER_SECONDS = 2.0  # limit for stacks
SETTLED_SECONDS = 0.1  # stacks are written in pieces: complete when nothing arrives for this time
PY_SPY_SECONDS = 15.0  # py-spy reads the symbols of every library
STACKS_SHOWN = 30  # lines
GONE = "gone"


@dataclass(frozen=True, slots=True)
class ProcessState:
    """State of one process.

    status: psutil's name for it (sleeping, running, stopped, disk-sleep, zombie ...), or gone. waits_in: of each thread, its
    name and the kernel function in which it waits. rss: bytes. stacks: of all Python threads; "" if the process does not
    answer. collectives: see collectives_of. native: for a process without stacks, the output of py-spy or the reason why
    there is none; "" if py-spy is not installed.
    """

    pid: int
    command: str
    status: str
    waits_in: tuple[str, ...]
    rss: int
    stacks: str
    collectives: str = ""
    native: str = ""

    @property
    def stopped(self) -> bool:
        """Stopped by a signal or by a debugger."""
        return self.status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)

    @property
    def dead(self) -> bool:
        return self.status in (GONE, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


@dataclass(frozen=True, slots=True)
class RankState:
    """State of one rank.

    answered: whether it has returned from the call. processes: its own, then its descendants; empty if they could not be
    inspected. last_lines: of its log, if it can be read.
    """

    rank: int
    answered: bool
    processes: tuple[ProcessState, ...]
    log: Path | None
    last_lines: tuple[str, ...]

    def words(self) -> str:
        """Text for the user: last lines of the rank's log, and the stack of its main thread, innermost call first."""
        log = [f"last lines of {self.log}:", *(self.last_lines or ["(none)"])] if self.log is not None else []
        stacks = self.processes[0].stacks if self.processes else ""
        # "Thread 0x" or "Current thread 0x"; the main thread comes last.
        lines = stacks.rpartition("hread 0x")[2].splitlines()[1:]
        return "\n".join([*log, *(["where it is:", *lines[:STACKS_SHOWN]] if lines else [])])


def examine(pids: Sequence[int]) -> list[tuple[ProcessState, ...]]:
    """State of each process and of its descendants, its own first."""
    families = [_family(pid) for pid in pids]
    everyone = sorted({pid for family in families for pid in family})
    # In parallel: each process that does not answer takes all of ANSWER_SECONDS.
    with ThreadPoolExecutor(max(1, len(everyone))) as pool:
        states = dict(zip(everyone, pool.map(_state, everyone), strict=True))
    return [tuple(states[pid] for pid in family) for family in families]


def _family(pid: int) -> list[int]:
    """The process and its descendants."""
    with suppress(psutil.NoSuchProcess):
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    return [pid]


def _state(pid: int) -> ProcessState:
    try:
        process = psutil.Process(pid)
        status = process.status()
        command = " ".join(" ".join(process.cmdline()).split()) or process.name()  # Ray pads it with blanks
        rss = process.memory_info().rss
    except psutil.Error:  # the process has ended meanwhile
        return ProcessState(pid, "", GONE, (), 0, "")
    state = ProcessState(pid, command, status, _waits_in(pid), rss, "")
    # Such a process cannot answer: do not wait for it.
    if state.stopped or state.dead:
        return state
    stacks = _stacks(pid)
    return replace(state, stacks=stacks, collectives=collectives_of(pid), native="" if stacks else _native_stacks(pid))


def _waits_in(pid: int) -> tuple[str, ...]:
    """``thread name: kernel function`` of each thread, as far as the kernel reports it."""
    found = []
    for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
        with suppress(OSError):  # a thread that has ended
            found.append(f"{(task / 'comm').read_text().strip()}: {(task / 'wchan').read_text()}")
    return tuple(found)


def _stacks(pid: int) -> str:
    """Python stacks of a process; "" if it does not answer."""
    if pid == os.getpid():
        return own_stacks()
    memory = memory_of_stacks(pid)
    # Without a handler SIGNAL would end the process: send it only if the memory shows that there is one.
    if memory is None:
        return ""
    try:
        with memory.open("rb") as file:
            file.seek(0, os.SEEK_END)
            os.kill(pid, SIGNAL)
            return _written(file).decode(errors="replace")
    except OSError:  # the process has ended meanwhile
        return ""


def _written(file: BinaryIO) -> bytes:
    """Read until nothing more arrives."""
    stacks, deadline = b"", time.monotonic() + ANSWER_SECONDS
    while time.monotonic() < deadline:
        time.sleep(SETTLED_SECONDS)
        more = file.read()
        if stacks and not more:
            break
        stacks += more
    return stacks


def _native_stacks(pid: int) -> str:
    """Python and C frames of all threads from py-spy, or one line with the reason why there are none."""
    places = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]  # prefer the one of this environment
    program = shutil.which("py-spy", path=os.pathsep.join(places))
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, "dump", "--native", "--pid", str(pid)], capture_output=True, text=True, timeout=PY_SPY_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"py-spy has not answered in {PY_SPY_SECONDS:g} s"
    if done.returncode == 0:
        return done.stdout
    if "ermission" in done.stderr or "not permitted" in done.stderr:
        return "py-spy may not attach: ptrace is not allowed here (it takes CAP_SYS_PTRACE, or kernel.yama.ptrace_scope=0)"
    return f"py-spy: {done.stderr.partition(chr(10))[0]:.200}"  # the first line; a backtrace of py-spy itself follows
