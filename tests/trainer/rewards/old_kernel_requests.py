"""The fork server on Linux 5.0 to 5.4: thread requests are delivered and cannot be granted."""

import errno
import fcntl
import struct
from types import SimpleNamespace
from typing import Any

from trainer.rewards.sandbox import sandbox, seccomp


def main(fd: int) -> None:
    seccomp.fcntl = SimpleNamespace(**vars(fcntl) | {"ioctl": ioctl})  # type: ignore[assignment]
    sandbox.main(fd)


def ioctl(file: int, command: int, data: Any) -> Any:
    if command == 0xC0182101 and struct.unpack("I", data[20:24])[0]:
        raise OSError(errno.EINVAL, "no such flag")
    return fcntl.ioctl(file, command, data)
