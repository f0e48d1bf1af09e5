"""Orderly termination: signals become exceptions, so that every `with` block closes what it opened."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@contextmanager
def graceful_stop() -> Iterator[None]:
    """Within the block SIGINT, SIGTERM and SIGHUP unwind the stack. For the main thread.

    Ctrl-C leaves as KeyboardInterrupt, the others as SystemExit(128 + n). A signal that the parent process made this one
    ignore (nohup) stays ignored.
    """
    received: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(number)
        # Raised within ray.wait, a KeyboardInterrupt arrives intact, a SystemExit loses its code, and others are lost: raise
        # this one for every signal, and convert it below.
        raise KeyboardInterrupt

    with handlers_kept():
        _install(stop)
        try:
            yield
        except KeyboardInterrupt:
            if not received or received[0] == signal.SIGINT:
                raise
            raise SystemExit(128 + received[0]) from None


@contextmanager
def shielded() -> Iterator[None]:
    """Delay signals to the end of the block: a second Ctrl-C must not leave processes behind."""
    received: list[int] = []
    try:
        with handlers_kept():
            _install(lambda number, frame: received.append(number))
            yield
    finally:
        for number in received[:1]:
            signal.raise_signal(number)


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Restore the handlers of these signals after the block, whatever it does to them (ray.init replaces one)."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _install(handler: Callable[[int, FrameType | None], object]) -> None:
    """Set the handler of all signals that are not ignored."""
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when the thread that started it ends. parent: process id of the starter.

    Raises OSError if the kernel refuses.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it ended before prctl took effect
        os._exit(1)


def kill_group(process: subprocess.Popen[bytes]) -> str:
    """Kill a process that leads a session, and everything it started in it; return how it ended."""
    with suppress(ProcessLookupError):  # all processes of the group have exited
        os.killpg(process.pid, signal.SIGKILL)
    code = process.wait()
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
