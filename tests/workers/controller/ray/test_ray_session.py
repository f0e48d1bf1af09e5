"""Directories of a session: short enough for sockets, private, and removed afterwards."""

import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from workers.controller.environment import import_path, set_environment
from workers.controller.ray import ray_session
from workers.controller.ray.ray_session import MARK, SOCKET_BELOW, SessionDir, end_processes, family

KILLED = """
import os, subprocess, sys
from pathlib import Path
from workers.controller.ray.ray_session import MARK, SessionDir
session = SessionDir(Path(sys.argv[1]))
os.environ[MARK] = session.mark
orphan = subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL)
print(orphan.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def short_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A run directory with a short path, however deep pytest's is."""
    monkeypatch.chdir(tmp_path)
    return Path(".")


def bind_below(session: SessionDir) -> None:
    path = Path(f"{session.path}{SOCKET_BELOW.removeprefix('/t')}")
    path.parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def test_session_is_in_a_short_run_directory(short_dir: Path) -> None:
    session = SessionDir(short_dir)
    bind_below(session)
    assert session.path.parent.parent == short_dir
    assert (short_dir / "ray").resolve() == session.path.resolve()
    session.remove()
    assert list(short_dir.iterdir()) == []


def test_session_of_a_deep_run_directory_is_elsewhere(tmp_path: Path) -> None:
    run_dir = tmp_path / ("deep" * 20)
    session = SessionDir(run_dir)
    bind_below(session)
    assert len(f"{session.path}{SOCKET_BELOW}") <= 107
    assert session.spill.parent == run_dir, "large files are not in the short directory"
    assert session.path.parent.stat().st_mode & 0o077 == 0, "other users have no access"
    assert (run_dir / "ray").readlink() == session.path
    session.remove()
    assert list(run_dir.iterdir()) == [] and not session.path.parent.exists()


def test_two_sessions_have_separate_directories(tmp_path: Path) -> None:
    first, second = SessionDir(tmp_path), SessionDir(tmp_path)
    assert first.path != second.path and first.spill.exists() and second.spill.exists()
    first.remove()
    assert second.spill.exists() and (tmp_path / "ray").readlink() == second.path
    second.remove()


def test_next_session_removes_the_directory_of_a_killed_run(tmp_path: Path) -> None:
    dead = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True, timeout=60)
    assert dead.returncode == -signal.SIGKILL
    orphan = int(dead.stdout)
    (left,) = tmp_path.glob(".ray-*")
    assert is_alive(orphan)
    session = SessionDir(tmp_path)
    assert not left.exists() and not is_alive(orphan)
    session.remove()


@pytest.mark.parametrize("moment", ["open", "flock"])
def test_session_that_ends_during_the_search_for_dead_ones_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Its directory disappears just before the system call that would find it missing."""
    ending = tmp_path / ".ray-ending"
    ending.mkdir()
    module = {"open": os, "flock": fcntl}[moment]
    call = getattr(module, moment)

    def gone_before(what: object, flags: int, **options: object) -> object:
        if ending.exists() and (what == ending or flags == fcntl.LOCK_EX | fcntl.LOCK_NB):
            ending.rmdir()
        return call(what, flags, **options)

    monkeypatch.setattr(module, moment, gone_before)
    session = SessionDir(tmp_path)
    assert not ending.exists() and session.path.parent.exists()
    session.remove()


def test_only_marked_processes_are_ended() -> None:
    with set_environment({MARK: "this run's"}):
        actual = subprocess.Popen(["sleep", "600"])
    with set_environment({MARK: "another run's"}):
        other = subprocess.Popen(["sleep", "600"])
    end_processes(["this run's"])
    assert actual.poll() is not None
    assert other.poll() is None
    other.kill()
    other.wait()


def test_ray_processes_are_found_by_their_log_files(tmp_path: Path) -> None:
    """Their title overwrites a part of their environment. The file may be removed; processes of other sessions are kept."""
    own, other = tmp_path / "own", tmp_path / "other"
    started = {}
    for title, folder in (("ray::Agent", own), ("ray::Agent", other), ("tail", own)):
        folder.mkdir(exist_ok=True)
        with (folder / "agent.log").open("a") as file:
            started[title, folder] = subprocess.Popen([title, "600"], executable="/usr/bin/sleep", stdout=file)
    (own / "agent.log").unlink()
    end_processes([str(own)])
    assert {key: process.poll() is None for key, process in started.items()} == {
        ("ray::Agent", own): False, ("ray::Agent", other): True, ("tail", own): True
    }  # fmt: skip
    for process in started.values():
        process.kill()
        process.wait()


def test_children_are_found_after_the_clock_was_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """psutil ignores a child that is older than its parent, and its clock may be set back."""
    with set_environment({MARK: "of a parent"}):
        parent = subprocess.Popen(
            ["sh", "-c", "env -u TANDEM_SESSION sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, text=True
        )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    boot = iter(range(10**9, 0, -1))
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: next(boot))
    assert {parent.pid, child} <= {process.pid for process in family(["of a parent"])}
    end_processes(["of a parent"])
    parent.wait(timeout=10)
    assert not is_alive(child)
    parent.stdout.close()


def test_environment_is_restored() -> None:
    before = dict(os.environ)
    with set_environment({MARK: "x"}):
        os.environ["ANOTHER"] = "y"
    assert dict(os.environ) == before


def test_workers_have_the_module_path_of_this_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    assert import_path()[0] == str(tmp_path)
    assert not [path for path in import_path() if "site-packages" in path]


def test_concurrent_starts_do_not_interfere() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, ThreadPoolExecutor(8) as runs:
        assert set(runs.map(ray_session._socket_problem, [Path(folder)] * 400)) == {None}
