"""Exclusive locks on directories, so that only one run at a time writes into a directory.

The lock is an open-file-description (OFD) lock of fcntl on a file in the directory. The kernel releases it when the process ends
for any reason, so a killed run leaves no stale lock. On NFS (versions 3 and 4) it also excludes other machines. After a crash the
server may keep a machine's lock for a lease of about 90 s, so a lock held by another machine is waited for.

Unlike a classic POSIX record lock, an OFD lock is not released when other code in the process, such as an uploader, opens and
closes the file. Child processes must not keep it alive: executed programs do not inherit the descriptor, and a forked child
closes its copy.
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
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile

LOCK = "run.lock"
WHOLE_FILE = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)  # struct flock of 64-bit Linux
HELD = (errno.EAGAIN, errno.EACCES)
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)

LEASE_SECONDS, POLL_SECONDS = 120.0, 1.0  # maximum wait for a lock of another machine, and interval between attempts

_descriptors: set[int] = set()


@contextmanager
def locked(directory: Path, key: str, name: str = LOCK) -> Iterator[None]:
    """Hold the lock of ``directory``, which is created if it is missing, during the block.

    key: configuration key of the directory, for messages. name: name of the lock file; locks of different files are independent.
    Raises ValueError if the directory cannot be created or written to, and with the holder's host, process and start time if
    another process holds the lock. On a file system without locks the block runs unlocked, with a warning on stderr.
    """
    path, owner = directory / name, os.getpid()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise ValueError(_not_writable(directory, key, error)) from error
    try:
        _take(descriptor, path, key)
        # The holder is written only after the lock is taken; until then the file describes the previous holder.
        os.truncate(descriptor, 0)
        holder = f"process {os.getpid()} on {socket.gethostname()}, started {time.strftime('%Y-%m-%d %H:%M:%S')}"
        os.pwrite(descriptor, f"{holder}\n".encode(), 0)
        os.fsync(descriptor)  # other machines that share the directory read it
        _descriptors.add(descriptor)
        yield
    finally:
        # A forked child that leaves the block has already closed its copy (_close_all), and the number may be reused.
        if descriptor in _descriptors or os.getpid() == owner:
            _descriptors.discard(descriptor)
            os.close(descriptor)


def check_writable(directory: Path, key: str) -> None:
    """Raise ValueError if ``directory`` cannot be created or written to. Leaves nothing behind.

    key: configuration key of the directory, for messages.
    """
    # os.path, unlike Path.exists, does not raise below a directory that may not be searched.
    missing = [path for path in (directory, *directory.parents) if not os.path.exists(path)]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ValueError(_not_writable(directory, key, error)) from error
    finally:
        for path in missing:
            with suppress(OSError):  # it was not created, or another process has written into it
                path.rmdir()


def _not_writable(directory: Path, key: str, error: OSError) -> str:
    files = (path for path in (directory, *directory.parents) if os.path.isfile(path))
    what = next((f"{path} is a file" for path in files), error.strerror)
    return f"{key}={directory}: {what}; choose a directory in which files can be created"


def _take(descriptor: int, path: Path, key: str) -> None:
    """Take the lock; wait for at most one lease if another machine holds it. Raises ValueError if it stays locked."""
    deadline, noted = time.monotonic() + LEASE_SECONDS, False
    while True:
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, WHOLE_FILE)
            return
        except OSError as error:
            if error.errno in NO_LOCKS:
                print(f"note: {path}: {error.strerror}; the directory is not protected against a second run", file=sys.stderr)
                return
            if error.errno not in HELD:
                raise
            holder = path.read_text(encoding="utf-8")
            # A lock of this machine has a living holder: fail at once. One of another machine may be a lease that expires.
            elsewhere = " on " in holder and f" on {socket.gethostname()}," not in holder
            if not elsewhere or time.monotonic() > deadline:
                raise ValueError(in_use(path, key)) from error
            if not noted:
                print(f"note: {in_use(path, key)}; waiting for at most {LEASE_SECONDS:g} s", file=sys.stderr)
                noted = True
            time.sleep(POLL_SECONDS)


def in_use(path: Path, key: str) -> str:
    """Error text for a locked directory, with the holder from the lock file."""
    holder = path.read_text(encoding="utf-8").strip() or "a process that has just started"
    return (
        f"{key}={path.parent}: in use by {holder}; wait until it ends, stop it, or use another directory (if its machine is down "
        f"and the lock remains, remove {path})"
    )


def _close_all() -> None:
    for descriptor in _descriptors:
        os.close(descriptor)
    _descriptors.clear()


os.register_at_fork(after_in_child=_close_all)
