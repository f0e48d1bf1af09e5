import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from configs.base.locks import LOCK, check_writable, locked

HOLDER = """
import os, signal, subprocess, sys
from pathlib import Path
from configs.base.locks import locked
child = 0
with locked(Path(sys.argv[1]), "trainer.default_local_dir"):
    {then}
    print(child, flush=True)
    sys.stdin.read()
"""
READ = "(Path(sys.argv[1]) / 'run.lock').read_text()"
FORK = "ends = os.pipe(); child = os.fork() or (os.write(ends[1], b'x') and signal.pause()); os.read(ends[0], 1)"
START = "child = subprocess.Popen(['sleep', '60'], close_fds=False, stdout=subprocess.DEVNULL).pid"


@contextmanager
def held(directory: Path, then: str = "pass") -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Another process that holds the lock and executes ``then``, and the id of its child. Both are killed after the block."""
    command = [sys.executable, "-c", HOLDER.format(then=then), str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            yield process, child
        finally:
            process.kill()
            if child:
                os.kill(child, signal.SIGKILL)


def lock(directory: Path) -> None:
    with locked(directory, "trainer.default_local_dir"):
        pass


def test_a_held_lock_is_refused_with_its_holder_and_start_time(tmp_path: Path) -> None:
    run = tmp_path / "new" / "run"
    with held(run) as (process, _):
        holder = rf"process {process.pid} on {socket.gethostname()}, started 20\d\d-.*; wait"
        with pytest.raises(ValueError, match=f"^trainer.default_local_dir={run}: in use by {holder}"):
            lock(run)
    lock(run)


@pytest.mark.parametrize(
    ("directory", "reason"), [("/proc/there", "No such .*"), ("{file}/below", "{file} is a file"), ("{file}", "{file} is a file")]
)
def test_a_directory_that_takes_no_files_is_refused_by_its_key(directory: str, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    path = Path(directory.format(file=file))
    expected = rf"^a\.key={path}: {reason.format(file=file)}; choose a directory in which files can be created$"
    with pytest.raises(ValueError, match=expected), locked(path, "a.key"):
        pass
    with pytest.raises(ValueError, match=expected):
        check_writable(path, "a.key")


def test_check_of_a_directory_leaves_nothing(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b", "a.key")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a").mkdir()
    check_writable(tmp_path / "a" / "b", "a.key")
    check_writable(tmp_path / "a", "a.key")
    assert list(tmp_path.rglob("*")) == [tmp_path / "a"]


def test_a_process_takes_the_lock_again_only_after_its_release(tmp_path: Path) -> None:
    """A second run_ppo in a thread is refused; a restarted run is not."""
    with locked(tmp_path, "x"), pytest.raises(ValueError, match=f"in use by process {os.getpid()} "):
        lock(tmp_path)
    lock(tmp_path)


def test_reading_the_file_keeps_the_lock(tmp_path: Path) -> None:
    """A POSIX record lock ends when its process closes any descriptor of the file, as an uploader or a copy would."""
    with held(tmp_path, READ), pytest.raises(ValueError, match="in use"):
        lock(tmp_path)


@pytest.mark.parametrize("then", ["pass", FORK, START])
def test_a_killed_holder_leaves_no_lock(tmp_path: Path, then: str) -> None:
    """Neither does a child that outlives it, forked or started with all descriptors."""
    with held(tmp_path, then) as (process, child):
        process.kill()
        process.wait()
        assert not child or psutil.pid_exists(child)
        lock(tmp_path)


def test_a_file_system_without_locks_gives_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*words: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    lock(tmp_path)
    note = f"note: {tmp_path / LOCK}: No locks available; the directory is not protected against a second run\n"
    assert capsys.readouterr().err == note


def test_another_error_of_the_file_system_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*words: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "fcntl", fail)
    with pytest.raises(OSError, match="Input/output"):
        lock(tmp_path)
