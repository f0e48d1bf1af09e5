"""A late call prints its stack and continues."""

import threading
import time

import pytest

from tests.workers.controller.toy import Toy
from workers.controller.group import Limit, WorkerError, wait_any
from workers.controller.local_backend import LocalBackend, stacks_after
from workers.controller.resource_pool import ResourcePool
from workers.controller.rpc import worker_call


def test_late_block_prints_its_stack(capfd: pytest.CaptureFixture[str]) -> None:
    with stacks_after(0.05):
        time.sleep(0.2)
    message = capfd.readouterr().err
    assert message.startswith("Timeout (") and "in test_late_block_prints_its_stack" in message


@pytest.mark.parametrize("seconds", [0.1, None])
def test_block_within_its_limit_prints_nothing(seconds: float | None, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), stacks_after(seconds):
        raise KeyError
    time.sleep(0.2)
    assert capfd.readouterr().err == ""


def test_block_with_a_shorter_limit_than_an_open_one_is_reported_in_time(capfd: pytest.CaptureFixture[str]) -> None:
    with stacks_after(60.0):
        time.sleep(0.1)  # the thread waits for this limit by now
        with stacks_after(0.05):
            time.sleep(0.2)
    assert capfd.readouterr().err.startswith("Timeout (0:00:00.05")


def test_many_short_blocks_need_one_thread() -> None:
    with stacks_after(60.0):
        before = threading.active_count()
    started = {thread.ident for _ in range(10) for thread in open_block()}
    assert threading.active_count() == before and started == {thread.ident for thread in threading.enumerate()}


def open_block() -> list[threading.Thread]:
    """Threads of this process within a block."""
    with stacks_after(60.0):
        return threading.enumerate()


def test_late_call_in_this_process_continues(capfd: pytest.CaptureFixture[str]) -> None:
    with LocalBackend() as backend:
        group = backend.start_group("toy", ResourcePool((1,), "cpu", "p"), Toy)
        assert group.call(worker_call(Toy.note, "x", pause=0.2), limit=Limit(0.05)).result() == [1]
    assert "in note" in capfd.readouterr().err


def test_limit_applies_to_all_ranks_together(capfd: pytest.CaptureFixture[str]) -> None:
    with LocalBackend() as backend:
        group = backend.start_group("toy", ResourcePool((3,), "cpu", "p"), Toy)
        assert group.call(worker_call(Toy.note, "x", pause=0.15), limit=Limit(0.2)).result() == [1, 1, 1]
    assert "in note" in capfd.readouterr().err


def test_waiting_for_a_failed_call_returns_it() -> None:
    with LocalBackend() as backend:
        group = backend.start_group("toy", ResourcePool((1,), "cpu", "p"), Toy)
        future = group.call(worker_call(Toy.fail, 0))
        assert wait_any([future], 1.0) == [future]
        with pytest.raises(WorkerError, match="rank 0 failed in fail"):
            future.result()
