"""The guard ends the processes of a killed run, and ends with a run that shuts down."""

import os
import subprocess
import sys
from pathlib import Path

import psutil

from workers.controller.ray.guard import Guard
from workers.controller.ray.ray_session import MARK

KILLED = """
import os, subprocess, sys
from workers.controller.ray.guard import Guard
from workers.controller.ray.ray_session import MARK
Guard([sys.argv[1]])
os.environ[MARK] = sys.argv[1]
orphan = subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL)
print(orphan.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_guard_ends_all_processes_of_a_killed_run(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True, timeout=60)
    try:
        left = [psutil.Process(int(killed.stdout))]
    except psutil.NoSuchProcess:  # it has already ended
        return
    _, alive = psutil.wait_procs(left, timeout=20)
    assert alive == []


def test_dismissed_guard_ends_no_process(tmp_path: Path) -> None:
    mine = subprocess.Popen(["sleep", "600"], env=os.environ | {MARK: str(tmp_path)})
    before = set(psutil.Process().children())
    guard = Guard([str(tmp_path)])
    (process,) = set(psutil.Process().children()) - before
    guard.dismiss()
    assert not process.is_running() and mine.poll() is None
    mine.kill()
    mine.wait()
