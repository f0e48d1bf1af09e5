"""What surrounds a Ray of our own: directories and an environment for each run, both gone when the run is over."""

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

# The longest socket path of Ray below a directory of ours. Ray opens its own directory, t, to every user; ours is closed.
SOCKET_BELOW = "/t/session_2026-11-20_10-53-05_607649_4194304/sockets/plasma_store"
_PREFIX = ".ray-"
MARK = "TANDEM_SESSION"  # in the environment of every process of a Ray of ours, and of whatever these start

log = logging.getLogger(__name__)


class SessionDir:
    """path: for sockets and logs; in the run directory if a socket's path (107 bytes at most) fits there, else below a short
    directory of this user. spill: for what may be large; always in the run directory. ``<run_dir>/ray`` links to path.

    Both are locked while this process lives: what a killed run left is known by its free lock, and goes when the next run starts,
    directories and processes. mark: of this session's processes. places: its directories.
    """

    def __init__(self, run_dir: Path) -> None:
        """Raises ValueError if no place takes a socket."""
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
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
        for path, lock in self._locks.items():
            shutil.rmtree(path)
            os.close(lock)
        if self._link.is_symlink() and self._link.readlink() == self.path:  # not that of a later run
            self._link.unlink()

    def _claim(self, parent: Path) -> Path:
        """A new directory, locked; what dead runs left beside it is removed."""
        with _locked(parent):
            for other in parent.glob(f"{_PREFIX}*"):
                _remove_if_dead(other)
            path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            self._locks[path] = os.open(path, os.O_RDONLY)
            fcntl.flock(self._locks[path], fcntl.LOCK_EX)
        return path


def _home_of_sockets(run_dir: Path) -> Path:
    """The first directory in which a session's sockets can be bound."""
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
    """Why a socket as deep as Ray's cannot be bound below ``parent``: its path is too long, or the file system has no sockets."""
    path = parent / uuid.uuid4().hex.ljust(len(_PREFIX) + 8 + len(SOCKET_BELOW), "s")  # another run may try at the same time
    with socket.socket(socket.AF_UNIX) as trial:
        try:
            trial.bind(str(path))
        except OSError as error:
            return f"{parent}: {error} (a path of {len(os.fsencode(path))} bytes, 107 are possible)"
    path.unlink()
    return None


def _remove_if_dead(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        end_processes([str(path), os.path.realpath(path)])
        shutil.rmtree(path)
    except BlockingIOError:  # its run is alive
        return
    finally:
        os.close(descriptor)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def family(places: Collection[str]) -> set[psutil.Process]:
    """All that belong to a session, and their descendants. places: its directories, the first of which is its mark.

    Ray's processes write their title over a part of their environment, the mark perhaps in it; they have log files open.
    """
    everyone = list(psutil.process_iter())
    found = {process for process in everyone if bears(process, places) or logs_to(process, places)}
    by_parent: dict[int, list[psutil.Process]] = {}
    for process in everyone:
        with suppress(psutil.NoSuchProcess):  # not psutil's children(): it compares times by a clock that may be set
            by_parent.setdefault(process.ppid(), []).append(process)
    unseen = list(found)
    while unseen:
        children = by_parent.get(unseen.pop().pid, [])
        unseen += [child for child in children if child not in found]
        found.update(children)
    return found


def end_processes(places: Collection[str], known: Iterable[psutil.Process] = ()) -> None:
    """Ends the session's family, wherever it went, and what was known of it before its parents were gone."""
    left = list(known)
    for _ in range(3):  # one may have been starting another
        left = list(family(places).union(left))
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        _, left = psutil.wait_procs(left, timeout=5)
    if left:
        log.warning("processes that do not die: %s", left)


def bears(process: psutil.Process, marks: Collection[str]) -> bool:
    try:
        return process.environ().get(MARK) in marks
    except psutil.Error:  # another user's, or gone
        return False


def logs_to(process: psutil.Process, places: Collection[str]) -> bool:
    """Whether it has the title of a process of Ray's, and a file open below one of the places (it may be removed by now)."""
    try:
        if not "".join(process.cmdline()[:1]).startswith("ray::"):
            return False
        opened = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{process.pid}/fd")]
    except (psutil.Error, OSError):  # another user's, or gone
        return False
    return any(path.startswith(f"{place}/") for path in opened for place in places)
