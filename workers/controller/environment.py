"""Environment variables, import path and memory limit of the processes that are started from this one."""

from __future__ import annotations

import os
import resource
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


def import_path() -> list[str]:
    """Absolute entries of sys.path beyond the interpreter's own libraries: the import path of workers, wherever they start."""
    own = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    paths = [os.path.abspath(path) for path in sys.path]
    return [path for path in paths if os.path.exists(path) and not path.startswith(own)]


@contextmanager
def set_environment(environment: Mapping[str, str]) -> Iterator[None]:
    """Set variables for this process and for those started within the block; restore all variables afterwards."""
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        yield
    finally:
        # Restore everything, not only the given variables: the block may have set others.
        os.environ.clear()
        os.environ.update(before)


def limit_memory(size: int) -> None:
    """Limit this process's data segment to ``size`` bytes: user code fails with MemoryError before the machine runs out."""
    # RLIMIT_DATA rather than RLIMIT_AS: libraries reserve large address ranges that they never touch.
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    bound = size if hard == resource.RLIM_INFINITY else min(size, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (bound, hard))
