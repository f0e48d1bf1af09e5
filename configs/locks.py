"""Exclusive locks on directories: one run at a time writes into one.

The lock is an open-file-description lock of fcntl on a file in the directory. The kernel drops it when the process ends, however
it ends, so that a killed run leaves none; it also holds between the machines of an NFS (versions 3 and 4). Unlike a classic
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

_descriptors: set[int] = set()


@contextmanager
def locked(directory: Path, key: str, name: str = LOCK) -> Iterator[None]:
    """Hold ``directory``, which is made if it is missing, for the block. key: of the configuration that names it. name: of the
    file; locks of different files do not exclude each other.

    Raises ValueError, one line with the holder's host, process and start, if another process holds it. On a file system without
    locks the block runs without one, and a line on stderr says so.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = directory / name
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, WHOLE_FILE)
        except OSError as error:
            if error.errno in HELD:
                raise ValueError(in_use(path, key)) from error
            if error.errno not in NO_LOCKS:
                raise
            print(f"note: {path}: {error.strerror}: nothing keeps a second run out of this directory", file=sys.stderr)
        os.truncate(descriptor, 0)
        holder = f"process {os.getpid()} on {socket.gethostname()}, started {time.strftime('%Y-%m-%d %H:%M:%S')}"
        os.pwrite(descriptor, f"{holder}\n".encode(), 0)
        os.fsync(descriptor)  # machines that share the directory read it
        _descriptors.add(descriptor)
        yield
    finally:
        _descriptors.discard(descriptor)
        os.close(descriptor)


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
