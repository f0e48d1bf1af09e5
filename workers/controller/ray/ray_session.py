"""Directories and environment of a Ray instance that belongs to one run; removed at the end of the run."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import socket
import tempfile
import uuid
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

# Longest path of a Ray socket below a session's directory. Ray makes its own directory, t, accessible to every user; the
# session's directory above it is private.
SOCKET_BELOW = "/t/session_2026-11-20_10-53-05_607649_4194304/sockets/plasma_store"
_PREFIX = ".ray-"
MARK = "TANDEM_SESSION"  # in the environment of all processes of such an instance, and of those that they start

log = logging.getLogger(__name__)


class SessionDir:
    """Directories of one Ray instance.

    path: for sockets and logs; in the run directory if the path of a socket (at most 107 bytes) fits there, else below a
    short directory of this user. spill: for data that may be large; always in the run directory. ``<run_dir>/ray`` links to
    path. mark: of this session's processes. places: mark and directories, as ``family`` takes them.

    The directories are locked while this process lives. One that is not locked was left by a killed run: the next run removes
    it, and ends the processes that belong to it.
    """

    def __init__(self, run_dir: Path) -> None:
        """Raises ValueError if no directory can hold a socket."""
        run_dir.mkdir(parents=True, exist_ok=True)
        self._locks: dict[Path, int] = {}
        self.spill = self._claim(run_dir)
        self.mark = str(self.spill)
        home = _home_of_sockets(run_dir)
        self.path = (self.spill if home == run_dir else self._claim(home)) / "t"
        self._link = run_dir / "ray"
        self._link.unlink(missing_ok=True)
        self._link.symlink_to(self.path)

    @property
    def places(self) -> list[str]:
        return [self.mark, *map(os.path.realpath, self._locks)]

    def remove(self) -> None:
        """Remove the directories and the link to them."""
        for path, lock in self._locks.items():
            shutil.rmtree(path)
            os.close(lock)
        if self._link.is_symlink() and self._link.readlink() == self.path:  # a later run may have replaced it
            self._link.unlink()

    def _claim(self, parent: Path) -> Path:
        """Create a directory in ``parent`` and lock it; remove the directories that dead runs left there."""
        # Until the new directory is locked, another run would take it for that of a dead one: lock the parent meanwhile.
        with _locked(parent):
            for other in parent.glob(f"{_PREFIX}*"):
                _remove_if_dead(other)
            path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            self._locks[path] = os.open(path, os.O_RDONLY)
            fcntl.flock(self._locks[path], fcntl.LOCK_EX)
        return path


def _home_of_sockets(run_dir: Path) -> Path:
    """First directory in which the sockets of a session can be bound. Raises ValueError, with the reasons, for none."""
    problems = [_socket_problem(run_dir)]
    if problems[0] is None:
        return run_dir
    for top in (tempfile.gettempdir(), "/tmp"):
        parent = Path(top) / f"tandem-{os.getuid()}"
        parent.mkdir(mode=0o700, exist_ok=True)
        if parent.is_symlink() or parent.stat().st_uid != os.getuid():
            problems.append(f"{parent}: belongs to another user")
            continue
        problem = _socket_problem(parent)
        if problem is None:
            return parent
        problems.append(problem)
    raise ValueError(f"no directory takes Ray's sockets: {'; '.join(filter(None, problems))}")


def _socket_problem(parent: Path) -> str | None:
    """Reason why a socket as deep as Ray's cannot be bound below ``parent``; None if it can.

    Either its path is too long, or the file system has no sockets.
    """
    # Unique: another run may try at the same time.
    path = parent / uuid.uuid4().hex.ljust(len(_PREFIX) + 8 + len(SOCKET_BELOW), "s")
    with socket.socket(socket.AF_UNIX) as trial:
        try:
            trial.bind(str(path))
        except OSError as error:
            return f"{parent}: {error} (a path of {len(os.fsencode(path))} bytes, 107 are possible)"
    path.unlink()
    return None


def _remove_if_dead(path: Path) -> None:
    """Remove a session's directory and end its processes, unless its run is alive.

    A run that ends removes its own directory, which may happen at any point in here.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.exists():  # else its run removed it between the two lines above
            end_processes([str(path), os.path.realpath(path)])
            shutil.rmtree(path)
    except BlockingIOError:  # locked: its run is alive
        return
    finally:
        os.close(descriptor)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the lock of a directory within the block."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def family(places: Collection[str]) -> set[psutil.Process]:
    """All processes of a session and their descendants. places: its directories, the first of which is its mark.

    Ray's processes write their title over a part of their environment, which may contain the mark: they are recognised by the
    log files that they have open.
    """
    everyone = list(psutil.process_iter())
    found = {process for process in everyone if bears(process, places) or logs_to(process, places)}
    by_parent: dict[int, list[psutil.Process]] = {}
    for process in everyone:
        with suppress(psutil.NoSuchProcess):  # psutil's children() compares times of a clock that may be set meanwhile
            by_parent.setdefault(process.ppid(), []).append(process)
    unseen = list(found)
    while unseen:
        children = by_parent.get(unseen.pop().pid, [])
        unseen += [child for child in children if child not in found]
        found.update(children)
    return found


def end_processes(places: Collection[str], known: Iterable[psutil.Process] = ()) -> None:
    """Kill the session's processes, also those in ``known``, which were found before their parents ended."""
    left = list(known)
    for _ in range(3):  # a process may have been starting another one
        left = list(family(places).union(left))
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        _, left = psutil.wait_procs(left, timeout=5)
    if left:
        log.warning("processes that do not die: %s", left)


def bears(process: psutil.Process, marks: Collection[str]) -> bool:
    """Whether one of the marks is in the environment of a process."""
    try:
        return process.environ().get(MARK) in marks
    except psutil.Error:  # it belongs to another user, or has ended
        return False


def logs_to(process: psutil.Process, places: Collection[str]) -> bool:
    """Whether a process has a title of Ray's, and a file open below one of the places (it may be removed by now)."""
    try:
        if not "".join(process.cmdline()[:1]).startswith("ray::"):
            return False
        opened = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{process.pid}/fd")]
    except (psutil.Error, OSError):  # it belongs to another user, or has ended
        return False
    return any(path.startswith(f"{place}/") for path in opened for place in places)
