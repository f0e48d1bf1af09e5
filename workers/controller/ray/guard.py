"""Ends what a killed run leaves: python -m workers.controller.ray.guard PLACE ..., with the run at the other end of its stdin.

A run that is killed by SIGKILL takes its Ray with it, but not the agents of Ray's node: these look for their raylet some seconds
long, and then try for a minute to tell Ray's control store, which is dead too, that it died.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection

from workers.controller.environment import import_path
from workers.controller.ray.ray_session import end_processes


class Guard:
    """Watches over this process until it is dismissed. places: see ``session.family``."""

    def __init__(self, places: Collection[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "workers.controller.ray.guard", *places],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(import_path())},
            start_new_session=True,  # a Ctrl-C in the run's terminal is not for it
        )

    def dismiss(self) -> None:
        self._process.kill()
        self._process.communicate()


def main(places: Collection[str]) -> None:
    sys.stdin.read()  # ends with the process that holds the other end
    end_processes(places)


if __name__ == "__main__":
    main(sys.argv[1:])
