"""Guard process that ends what a killed run leaves: python -m workers.controller.ray.guard PLACE ...

The run holds the other end of the guard's stdin, which closes when the run dies. A run that is killed by SIGKILL takes its
Ray with it, but not the agents of Ray's node: they look for their raylet for some seconds, and then try for a minute to
report its death to Ray's control store, which is dead too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection

from workers.controller.environment import import_path
from workers.controller.ray.ray_session import end_processes


class Guard:
    """Ends the session's processes if this process dies before ``dismiss``. places: see ``ray_session.family``."""

    def __init__(self, places: Collection[str]) -> None:
        self._process = subprocess.Popen(
            # -P: no folder of the working directory is imported in place of this package.
            [sys.executable, "-P", "-m", "workers.controller.ray.guard", *places],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(import_path())},
            start_new_session=True,  # a Ctrl-C in the run's terminal must not reach it
        )

    def dismiss(self) -> None:
        """End the guard without ending the session's processes."""
        # Killed before its stdin is closed: the guard takes the end of stdin for the death of the run.
        self._process.kill()
        self._process.communicate()


def main(places: Collection[str]) -> None:
    """Wait until the run is dead, then end the processes of its session."""
    sys.stdin.read()  # returns when the process that holds the other end has ended
    end_processes(places)


if __name__ == "__main__":
    main(sys.argv[1:])
