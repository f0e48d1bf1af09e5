"""Remote calls to one of SGLang's processes over a pipe, pipelined: further calls may be sent before the first returns."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import traceback
from collections import deque
from contextlib import suppress
from multiprocessing.connection import Connection
from operator import methodcaller
from typing import Any

RANKS = "TANDEM_SGLANG_RANKS"
"""Environment variable with the worker's socket address, to which the engine's rank processes connect."""
TAIL_LINES, TAIL_BYTES = 20, 8192  # of the log, quoted when the engine dies


class EngineDied(RuntimeError):
    """The engine's processes ended. The message has the call, the exit status and the last lines of the log."""


class Calls:
    """Caller's side of a connection to an engine process.

    process: the engine's first process, which ends if any other one ends. connection: to ``answer_calls`` in one of them. Calls
    are executed in the order in which they were sent.
    """

    def __init__(self, process: subprocess.Popen[bytes], connection: Connection) -> None:
        self._process, self._connection = process, connection
        self._begun: deque[str] = deque()

    def call(self, method: str, *args: Any) -> Any:
        """Call ``method`` and return its result. Raises RuntimeError with the engine's traceback, or EngineDied."""
        self.begin(method, *args)
        return self.wait()

    def begin(self, method: str, *args: Any) -> None:
        """Send a call without waiting. ``wait`` returns its result and raises its errors."""
        self._send(method, args)
        self._begun.append(method)

    def wait(self, left: int = 0) -> Any:
        """Wait until at most ``left`` calls are outstanding; returns the last result received. Raises as ``call`` does."""
        value = None
        # Answers arrive in the order of the calls, so the oldest outstanding call is the one that is answered next.
        while len(self._begun) > left:
            value = self._answer(self._begun.popleft())
        return value

    def _send(self, *message: Any) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # the engine died: _answer raises EngineDied with its status
            self._connection.send(message)

    def _answer(self, method: str) -> Any:
        try:
            done, value = self._connection.recv()
        except (EOFError, ConnectionResetError):
            # The connection closes when the process behind it ends, and the first process ends with it: wait for its status.
            status = self._process.wait()
            raise EngineDied(
                f"SGLang died in {method}: process {self._process.pid} ended with {status}\n{last_written()}"
            ) from None
        if not done:
            with suppress(RuntimeError):  # consume the answers of later calls, which would be taken for those of the next ones
                self.wait()
            raise RuntimeError(f"SGLang failed in {method}:\n{value}")
        return value


def answer_calls(connection: Connection, target: object) -> None:
    """Serve calls to methods of ``target`` until the other side closes. Answers: (True, result) or (False, traceback)."""
    while True:
        try:
            method, args = connection.recv()
        except EOFError:
            return
        try:
            answer = True, methodcaller(method, *args)(target)
        except Exception:
            answer = False, traceback.format_exc()
        connection.send(answer)


def last_written() -> str:
    """The last lines of the log file that is this process's stderr, which children inherit; empty if stderr is no file."""
    written = os.fstat(sys.stderr.fileno())
    if not stat.S_ISREG(written.st_mode):
        return ""
    with open(f"/proc/self/fd/{sys.stderr.fileno()}", "rb") as log:  # opened anew: stderr itself is open for writing
        log.seek(max(0, written.st_size - TAIL_BYTES))
        lines = log.read().decode(errors="replace").splitlines()
    return "\n".join(["it wrote last:", *lines[-TAIL_LINES:]])
