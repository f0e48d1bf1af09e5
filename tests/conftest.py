"""Rules for every test: one thread per process, no process left behind, and turns if there are several test processes."""

import gc
import os
import re
import signal
import time
import uuid
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import psutil
import pytest
import torch
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hypothesis import settings

from tests.turns import pytest_collection_modifyitems, pytest_runtest_protocol  # noqa: F401 - hooks

settings.register_profile("tandem", deadline=None, derandomize=True)  # the same examples in every run
settings.load_profile("tandem")
for _number in (signal.SIGINT, signal.SIGHUP):
    if (
        signal.getsignal(_number) is signal.SIG_IGN
    ):  # in a shell's background or under nohup; programs started by tests inherit it
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # for processes started by tests
FAMILY = uuid.uuid4().hex
os.environ["TANDEM_TEST_FAMILY"] = FAMILY  # inherited by all descendants of a test, also after their parent has ended


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection, which took a third of the time of tests that compose."""
    gc.collect()
    gc.freeze()


def descendants() -> list[psutil.Process]:
    """Living processes started from here: children, their children, orphans of either, and their children (a process that
    sets its own title has overwritten its environment)."""
    found = {os.getpid(): psutil.Process()}
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"TANDEM_TEST_FAMILY={FAMILY}".encode() in environ.read_bytes().split(b"\0"):
                pid = int(environ.parent.name)
                found[pid] = psutil.Process(pid)
        except (OSError, psutil.NoSuchProcess):  # of another user, or no longer running
            continue
    others = {process.pid: process for process in psutil.process_iter(["ppid"]) if process.pid not in found}
    while grown := [pid for pid, process in others.items() if process.info["ppid"] in found]:
        found |= {pid: others.pop(pid) for pid in grown}
    del found[os.getpid()]
    return [process for process in found.values() if must_end(process)]


OF_A_PARENT = re.compile("resource_tracker|_inductor/compile_worker")
"""Processes of Python and of torch that end with their parent."""


def must_end(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and not OF_A_PARENT.search(" ".join(process.cmdline()))
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="module", autouse=True)
def no_process_left_behind() -> Iterator[None]:
    """Fail a module that leaves a process running, and name the process."""
    yield
    deadline = time.monotonic() + 10
    while (left := descendants()) and time.monotonic() < deadline:
        time.sleep(0.05)
    named = [(process.pid, process.name()) for process in left]
    for process in left:
        process.kill()
    assert not named, f"left behind: {named}"


@pytest.fixture(scope="session", autouse=True)
def package_yaml_is_read_once() -> Iterator[None]:
    """Hydra parses nine files of configs/ for every composition, which is half of its time. Tests compose a thousand times."""
    Plugins.instance()  # imports Hydra's own modules again: the class that it uses exists only from here on
    source_type = SourcesRegistry.instance().resolve("pkg")
    read = source_type._read_config
    found: dict[tuple[str, int], ConfigResult] = {}

    def copied(source: ConfigSource, resource: Path) -> ConfigResult:
        key = str(resource), resource.stat().st_mtime_ns
        if key not in found:
            found[key] = read(source, resource)
        return deepcopy(found[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source_type, "_read_config", copied)
        yield
