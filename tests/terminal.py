"""A program at a terminal: the keys that a person presses, and the visible text.

The program is one of tests/warm.py, which takes the terminal.
"""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Sequence
from pathlib import Path

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")


class Terminal:
    """A terminal with 40 lines of 120 characters."""

    def __init__(self, command: Sequence[str], *, cwd: Path, env: dict[str, str]) -> None:
        self._controller, expected = pty.openpty()
        fcntl.ioctl(expected, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        plain = {
            name: value for name, value in env.items() if name not in ("COLUMNS", "LINES", "NO_COLOR", "CI", "TTY_COMPATIBLE")
        }
        self.process = subprocess.Popen(
            command, cwd=cwd, env=plain | {"TERM": "xterm-256color"}, stdin=expected, stdout=expected, stderr=expected,
            start_new_session=True,
        )  # fmt: skip
        os.close(expected)
        self.written = ""

    @property
    def text(self) -> str:
        """All text that was visible, one refresh after the other."""
        return CONTROL.sub("", self.written)

    def read(self, *, until: str | None = None, seconds: float = 60.0) -> str:
        """Read up to this text, or to the program's end."""
        deadline = time.monotonic() + seconds
        while until is None or until not in self.text:
            ready, _, _ = select.select([self._controller], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self.process.kill()
                raise AssertionError(f"{until!r} did not come in {seconds:g} s; what did: {self.text[-2000:]}")
            try:
                self.written += os.read(self._controller, 65536).decode(errors="replace")
            except OSError:  # the other end is closed
                assert until is None, f"it ended without {until!r}: {self.text[-2000:]}"
                break
        return self.text

    def press(self, keys: str) -> None:
        os.write(self._controller, keys.encode())

    def end(self) -> int:
        """Read to the end; return the exit code."""
        self.read()
        os.close(self._controller)
        return self.process.wait(30)
