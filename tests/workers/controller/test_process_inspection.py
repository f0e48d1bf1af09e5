"""Inspection of a process from outside: one that sleeps, one that holds the interpreter's lock, one that is stopped."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from workers.controller.process_inspection import GONE, ProcessState, RankState, examine

ROOT = Path(__file__).parents[3]
START = """
import ctypes, os, subprocess, sys, time
from workers.controller.stacks import enable_stack_reports
enable_stack_reports()
"""
SLEEPS = """
def nap():
    print(flush=True)
    time.sleep(600)
nap()
"""
HOLDS_LOCK = """
def extension():
    print(flush=True)
    ctypes.PyDLL(None).sleep(600)
extension()
"""
HAS_CHILDREN = """
def parent():
    if os.fork():
        subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"])
        time.sleep(600)
    time.sleep(601)
parent()
"""


@contextmanager
def process(code: str, start: str = START) -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", start + code], cwd=ROOT, stdout=-1, start_new_session=True) as child:
        try:
            assert child.stdout is not None and child.stdout.readline()
            yield child.pid
        finally:
            os.killpg(child.pid, signal.SIGKILL)


def test_process_that_holds_the_interpreter_lock_reports_its_stack() -> None:
    with process(HOLDS_LOCK) as pid:
        ((state,),) = examine([pid])  # sleep() ends at a signal
    assert "in extension\n" in state.stacks


def test_busy_process_reports_its_stack_and_continues() -> None:
    with process(SLEEPS) as pid:
        for _ in range(2):
            ((state,),) = examine([pid])
            assert "in nap\n" in state.stacks and state.stacks.count("hread 0x") == 1
        assert state.pid == pid and state.status == "sleeping" and state.rss > 2**20 and sys.executable in state.command


def test_process_that_cannot_reply_is_not_waited_for_and_not_woken() -> None:
    with process(SLEEPS) as pid:
        os.kill(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
        begun = time.monotonic()
        ((state,),) = examine([pid])
        assert state.stopped and state.stacks == "" and state.waits_in and time.monotonic() - begun < 1.0
        ((state,),) = examine([pid])
        assert state.stopped


def test_children_are_listed_and_only_responsive_ones_are_queried() -> None:
    """The signal would end a child that has no handler for it; a forked one would write among its parent's stacks."""
    with process(HAS_CHILDREN) as pid:
        for _ in range(2):
            ((own, *others),) = examine([pid])
            assert own.pid == pid and "in parent" in own.stacks
            assert sorted("time.sleep(600)" in child.command for child in others) == [True, True]
            assert [child.stacks for child in others] == ["", ""] and all(child.waits_in for child in others)


def test_ended_or_unreaped_process_is_dead() -> None:
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    ((zombie,),) = examine([child.pid])
    child.wait()
    ((gone,),) = examine([child.pid])
    assert zombie.dead and gone.dead and gone.status == GONE
    assert examine([]) == []


def test_text_of_a_rank(tmp_path: Path) -> None:
    stacks = 'Thread 0x1 (most recent call first):\n  File "b.py", line 1 in other\n\n'
    stacks += 'Current thread 0x2 (most recent call first):\n  File "a.py", line 3 in inner\n  File "a.py", line 9 in outer\n'
    own = ProcessState(7, "python", "sleeping", (), 1, stacks)
    rank = RankState(0, False, (own,), tmp_path / "log", ("one", "two"))
    log = f"last lines of {tmp_path}/log:"
    assert rank.words().splitlines() == [
        log, "one", "two", "where it is:", '  File "a.py", line 3 in inner', '  File "a.py", line 9 in outer'
    ]  # fmt: skip
    assert RankState(0, False, (), tmp_path / "log", ()).words() == f"{log}\n(none)"
    assert RankState(0, False, (), None, ()).words() == ""
