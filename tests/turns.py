"""With several test processes (pytest -n), a test marked ``alone`` has no other test beside it. A plugin that conftest.py has."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Waiting comes before pytest-timeout's clock starts."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    with turn(Path(item.config.getoption("basetemp")).parent, alone=item.get_closest_marker("alone") is not None):
        return (yield)


@contextmanager
def turn(folder: Path, *, alone: bool) -> Iterator[None]:
    """Beside others that are not alone, or when nobody else is here. Who waits to be alone comes before those that come later.

    folder: the same for all processes.
    """
    with (folder / "here").open("w") as here, (folder / "door").open("w") as door:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(here, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(here, fcntl.LOCK_UN)  # closing is not enough: processes that were forked meanwhile have it open too
