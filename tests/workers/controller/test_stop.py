"""Signals unwind the stack once, except in shielded blocks."""

import os
import signal
import subprocess
import sys
import time

import pytest

from workers.controller.stop import SIGNALS, graceful_stop, handlers_kept, shielded

CHILD = """
import os, time
from workers.controller.stop import die_with_parent
die_with_parent(os.getppid())
print(os.getpid(), flush=True)
time.sleep(600)
"""
PARENT = f"""
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdout=subprocess.PIPE, text=True)
print(child.stdout.readline(), end="", flush=True)
os.kill(os.getpid(), 9)
"""


def send(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(5)  # the signal interrupts it


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_termination_signal_becomes_an_exit_code(number: int) -> None:
    closed = []
    with pytest.raises(SystemExit) as left, graceful_stop():
        try:
            send(number)
        finally:
            closed.append(True)
    assert left.value.code == 128 + number
    assert closed == [True]


def test_ctrl_c_remains_a_keyboard_interrupt() -> None:
    with handlers_kept():
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell makes its background processes ignore it
        with pytest.raises(KeyboardInterrupt), graceful_stop():
            send(signal.SIGINT)


def test_signal_that_the_parent_ignores_stays_ignored() -> None:
    with handlers_kept():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        with graceful_stop():
            os.kill(os.getpid(), signal.SIGHUP)


def test_handlers_are_restored() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with graceful_stop(), shielded():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_shielded_block_completes_before_the_signal_is_handled() -> None:
    done = []
    with pytest.raises(SystemExit) as left, graceful_stop(), shielded():
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        done.append(True)
    assert done == [True] and left.value.code == 128 + signal.SIGTERM


def test_child_dies_with_a_killed_parent() -> None:
    parent = subprocess.run([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, timeout=60)
    child = int(parent.stdout)
    assert parent.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 5
    while os.path.exists(f"/proc/{child}") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not os.path.exists(f"/proc/{child}")
