"""Calls of one of SGLang's processes over a pipe. The next may lie ready before the last is done."""

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
"""In the environment of the engine's processes: where those of its ranks find the worker."""
TAIL_LINES, TAIL_BYTES = 20, 8192


class EngineDied(RuntimeError):
    """The engine's own processes ended. Says which, how, and what was written last to where they write."""


class Calls:
    """process: the engine's first one, which ends with each of the others. connection: to ``answer_calls`` in one of them."""

    def __init__(self, process: subprocess.Popen[bytes], connection: Connection) -> None:
        self._process, self._connection = process, connection
        self._begun: deque[str] = deque()

    def call(self, method: str, *args: Any) -> Any:
        """Raises RuntimeError with the engine's traceback, and EngineDied."""
        self.begin(method, *args)
        return self.wait()

    def begin(self, method: str, *args: Any) -> None:
        """It is done when those before it are. Its result, and what it raises, come in ``wait``."""
        self._send(method, args)
        self._begun.append(method)

    def wait(self, left: int = 0) -> Any:
        """Until at most ``left`` calls have no answer. The last answer that came. Raises as ``call`` does."""
        value = None
        while len(self._begun) > left:
            value = self._answer(self._begun.popleft())
        return value

    def _send(self, *message: Any) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # it died: the answer says so
            self._connection.send(message)

    def _answer(self, method: str) -> Any:
        try:
            done, value = self._connection.recv()
        except (EOFError, ConnectionResetError):
            status = self._process.wait()
            raise EngineDied(
                f"SGLang died in {method}: process {self._process.pid} ended with {status}\n{last_written()}"
            ) from None
        if not done:
            with suppress(RuntimeError):  # what was to come after it
                self.wait()
            raise RuntimeError(f"SGLang failed in {method}:\n{value}")
        return value


def answer_calls(connection: Connection, target: object) -> None:
    """Calls methods of ``target``, with (True, result) or (False, traceback) as the answer, until the other side closes."""
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
    """The last lines of the file that this process and its children write to, if it is one."""
    written = os.fstat(sys.stderr.fileno())
    if not stat.S_ISREG(written.st_mode):
        return ""
    with open(f"/proc/self/fd/{sys.stderr.fileno()}", "rb") as log:
        log.seek(max(0, written.st_size - TAIL_BYTES))
        lines = log.read().decode(errors="replace").splitlines()
    return "\n".join(["it wrote last:", *lines[-TAIL_LINES:]])
