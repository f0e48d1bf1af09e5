"""What processes of this machine are at, seen from outside: their stacks, and what the kernel tells of those that cannot say."""

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
from workers.controller.stacks import SIGNAL, memory_of_stacks

ANSWER_SECONDS = 2.0  # how long to wait for stacks
SETTLED_SECONDS = 0.1  # they are written in pieces
PY_SPY_SECONDS = 15.0  # it reads the symbols of every library
STACKS_SHOWN = 30  # lines
GONE = "gone"


@dataclass(frozen=True, slots=True)
class ProcessState:
    """status: psutil's word (sleeping, running, stopped, disk-sleep, zombie ...), or gone. waits_in: of each thread, its name and
    the kernel's function in which it waits. rss: bytes. stacks: of all Python threads, "" if it does not answer. collectives: see
    collectives_of. native: of a process without stacks, what py-spy finds, or why it finds nothing; "" if it is not installed.
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
        return self.status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)

    @property
    def dead(self) -> bool:
        return self.status in (GONE, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


@dataclass(frozen=True, slots=True)
class RankState:
    """answered: it has ended the call. processes: its own, then those that it started; none if nobody could look. last_lines: of
    its log, where somebody can read it.
    """

    rank: int
    answered: bool
    processes: tuple[ProcessState, ...]
    log: Path | None
    last_lines: tuple[str, ...]

    def words(self) -> str:
        """For people: the last lines of its log, and where its main thread is, the innermost call first."""
        said = [f"last lines of {self.log}:", *(self.last_lines or ["(none)"])] if self.log is not None else []
        stacks = self.processes[0].stacks if self.processes else ""
        lines = stacks.rpartition("hread 0x")[2].splitlines()[1:]  # the main thread is the last
        return "\n".join([*said, *(["where it is:", *lines[:STACKS_SHOWN]] if lines else [])])


def examine(pids: Sequence[int]) -> list[tuple[ProcessState, ...]]:
    """Of each process of this machine: its state and those of its descendants, its own first. All are asked at the same time."""
    families = [_family(pid) for pid in pids]
    everyone = sorted({pid for family in families for pid in family})
    with ThreadPoolExecutor(max(1, len(everyone))) as pool:
        states = dict(zip(everyone, pool.map(_state, everyone), strict=True))
    return [tuple(states[pid] for pid in family) for family in families]


def _family(pid: int) -> list[int]:
    with suppress(psutil.NoSuchProcess):
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    return [pid]


def _state(pid: int) -> ProcessState:
    try:
        process = psutil.Process(pid)
        status = process.status()
        command = " ".join(" ".join(process.cmdline()).split()) or process.name()  # Ray fills it up with blanks
        rss = process.memory_info().rss
    except psutil.Error:  # it ended meanwhile
        return ProcessState(pid, "", GONE, (), 0, "")
    state = ProcessState(pid, command, status, _waits_in(pid), rss, "")
    if state.stopped or state.dead:
        return state
    stacks = _stacks(pid)
    return replace(state, stacks=stacks, collectives=collectives_of(pid), native="" if stacks else _native_stacks(pid))


def _waits_in(pid: int) -> tuple[str, ...]:
    """``thread name: kernel function``, as far as the kernel tells."""
    found = []
    for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
        with suppress(OSError):  # a thread that has ended
            found.append(f"{(task / 'comm').read_text().strip()}: {(task / 'wchan').read_text()}")
    return tuple(found)


def _stacks(pid: int) -> str:
    memory = memory_of_stacks(pid)
    if memory is None:
        return ""
    try:
        with memory.open("rb") as file:
            file.seek(0, os.SEEK_END)
            os.kill(pid, SIGNAL)
            return _written(file).decode(errors="replace")
    except OSError:  # it ended meanwhile
        return ""


def _written(file: BinaryIO) -> bytes:
    """What comes, until no more does."""
    said, deadline = b"", time.monotonic() + ANSWER_SECONDS
    while time.monotonic() < deadline:
        time.sleep(SETTLED_SECONDS)
        more = file.read()
        if said and not more:
            break
        said += more
    return said


def _native_stacks(pid: int) -> str:
    """Python and C frames of all threads, by py-spy; in one line why there are none."""
    places = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]  # of this environment first
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
    return f"py-spy: {done.stderr.partition(chr(10))[0]:.200}"  # a trace of its own frames follows
