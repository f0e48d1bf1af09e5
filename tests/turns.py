"""Several test processes (pytest -n): a test marked ``alone`` runs with no other, and expensive fixtures are made once for all.

A plugin of conftest.py.
"""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

import pytest

APART = 24  # files


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files of one folder apart: two that need the same thing made (``made_once``) at the same time wait for each other."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        files = {path: list(group) for path, group in groupby(items, lambda item: item.path)}
        paths = list(files)
        items[:] = [item for start in range(APART) for path in paths[start::APART] for item in files[path]]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Wait before the clock of pytest-timeout starts."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    with turn(Path(item.config.getoption("basetemp")).parent, alone=item.get_closest_marker("alone") is not None):
        return (yield)


@contextmanager
def turn(folder: Path, *, alone: bool) -> Iterator[None]:
    """Run concurrently with others that are not alone, or when no other runs. One that waits to be alone precedes later ones.

    folder: the same for all processes.
    """
    with (folder / "here").open("w") as here, (folder / "door").open("w") as door:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(here, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(here, fcntl.LOCK_UN)  # closing is not enough: forked processes have it open too


def shared_folder(temporary: pytest.TempPathFactory) -> Path:
    """A folder shared by all test processes of this run."""
    own = temporary.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


def made_once(path: Path, make: Callable[[Path], None]) -> Path:
    """A directory that ``make`` fills, in the test process that asks first; the others wait for it."""
    with path.with_suffix(".making").open("w") as making:
        fcntl.flock(making, fcntl.LOCK_EX)
        if not path.exists():
            path.mkdir()
            make(path)
    return path
