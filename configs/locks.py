"""Exclusive locks on directories: one run at a time writes into one.

The lock is an open-file-description lock of fcntl on a file in the directory. The kernel drops it when the process ends, however
it ends, so that a killed run leaves none. On an NFS (versions 3 and 4) it also holds between machines; the server may keep the
lock of a machine that crashed for a lease of about 90 s, so that a lock of another machine is waited for. Unlike a classic
record lock it survives that something else in the process, such as an uploader, opens and closes the file. Children must not
keep it alive: programs that are started do not inherit the descriptor, and a forked child closes its own.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK = "run.lock"
WHOLE_FILE = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)  # struct flock of 64-bit Linux
HELD = (errno.EAGAIN, errno.EACCES)
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)

LEASE_SECONDS, POLL_SECONDS = 120.0, 1.0  # how long a lock of another machine is waited for, and between attempts

_descriptors: set[int] = set()


@contextmanager
def locked(directory: Path, key: str, name: str = LOCK, *, private: bool = False) -> Iterator[None]:
    """Hold ``directory``, which is made if it is missing, for the block. key: of the configuration that names it. name: of the
    file; locks of different files do not exclude each other. private: a directory that is made is its user's alone.

    Raises ValueError, one line with the holder's host, process and start, if another process holds it. On a file system without
    locks the block runs without one, and a line on stderr says so.
    """
    directory.mkdir(mode=0o700 if private else 0o777, parents=True, exist_ok=True)
    path, owner = directory / name, os.getpid()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _take(descriptor, path, key)
        os.truncate(descriptor, 0)
        holder = f"process {os.getpid()} on {socket.gethostname()}, started {time.strftime('%Y-%m-%d %H:%M:%S')}"
        os.pwrite(descriptor, f"{holder}\n".encode(), 0)
        os.fsync(descriptor)  # machines that share the directory read it
        _descriptors.add(descriptor)
        yield
    finally:
        if descriptor in _descriptors or os.getpid() == owner:  # a forked child has closed its own
            _descriptors.discard(descriptor)
            os.close(descriptor)


def _take(descriptor: int, path: Path, key: str) -> None:
    """Raises ValueError if another process keeps the lock."""
    deadline, noted = time.monotonic() + LEASE_SECONDS, False
    while True:
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, WHOLE_FILE)
            return
        except OSError as error:
            if error.errno in NO_LOCKS:
                print(f"note: {path}: {error.strerror}: nothing keeps a second run out of this directory", file=sys.stderr)
                return
            if error.errno not in HELD:
                raise
            holder = path.read_text(encoding="utf-8")
            elsewhere = " on " in holder and f" on {socket.gethostname()}," not in holder
            if not elsewhere or time.monotonic() > deadline:
                raise ValueError(in_use(path, key)) from error
            if not noted:
                print(f"note: {in_use(path, key)}; waiting for at most {LEASE_SECONDS:g} s", file=sys.stderr)
                noted = True
            time.sleep(POLL_SECONDS)


def in_use(path: Path, key: str) -> str:
    holder = path.read_text(encoding="utf-8").strip() or "a process that has just begun"
    return (
        f"{key}={path.parent}: in use by {holder}; wait for its end, stop it, or take another directory (if its machine is down "
        f"and the lock stays, remove {path})"
    )


def _close_all() -> None:
    for descriptor in _descriptors:
        os.close(descriptor)
    _descriptors.clear()


os.register_at_fork(after_in_child=_close_all)
