"""Provenance of a run: the command and the code that it was started with."""

from __future__ import annotations

import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

from configs.base.secrets import hidden
from trainer.run.version import __version__


def command_line() -> str:
    """The command that started this process, without secrets."""
    spec = sys.modules["__main__"].__spec__
    program = ["python", "-m", spec.name.removesuffix(".__main__")] if spec is not None else sys.argv[:1]
    return hidden(shlex.join([*program, *sys.argv[1:]]))


@cache
def code_version() -> dict[str, str | None]:
    """Version of the package and, in a git checkout, the commit ("+" appended for uncommitted changes)."""
    home = Path(__file__).resolve().parents[2]
    commit = None
    if (home / ".git").exists():
        # --exclude=* ignores all tags: the output is the commit itself, not a description relative to a tag.
        command = ["git", "-C", str(home), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
        try:
            commit = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip() or None
        except (FileNotFoundError, subprocess.TimeoutExpired):
            commit = None
    return {"tandem": __version__, "commit": commit}
