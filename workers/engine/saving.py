"""How a rank brings what it holds to disk, beside the training."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import TypeVar

from workers.engine.base import SavedFile

Result = TypeVar("Result")


def in_background(work: Callable[[], Result]) -> Future[Result]:
    """What ``work`` returns or raises, from a thread that does not keep the process alive."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, name="save", daemon=True).start()
    return future


def saved_files(directory: Path, names: Iterable[str]) -> list[SavedFile]:
    """Wait until the files are on disk, and take their size and hash from what is in the page cache."""
    found = []
    for name in names:
        with (directory / name).open("rb") as file:
            os.fsync(file.fileno())
            found.append(SavedFile(name=name, size=os.fstat(file.fileno()).st_size, sha256=sha256_of(directory / name)))
    return found


def sha256_of(path: Path) -> str:
    """In hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
