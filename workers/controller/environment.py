"""Environment variables and the import path of processes that are started here."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


def import_path() -> list[str]:
    """Where this interpreter looks for modules beyond its own libraries: workers look there too, wherever they start."""
    own = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    paths = [os.path.abspath(path) for path in sys.path]
    return [path for path in paths if os.path.exists(path) and not path.startswith(own)]


@contextmanager
def set_environment(environment: Mapping[str, str]) -> Iterator[None]:
    """For this process, and for those that are started within. As before after it, whatever was set."""
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
