"""A call that is late says where it is, and goes on."""

import time

import pytest

from tests.workers.controller.toy import Toy
from workers.controller.group import Limit
from workers.controller.local_backend import LocalBackend, stacks_after
from workers.controller.resource_pool import ResourcePool
from workers.controller.rpc import worker_call


def test_stacks_of_who_is_late(capfd: pytest.CaptureFixture[str]) -> None:
    with stacks_after(0.05):
        time.sleep(0.2)
    message = capfd.readouterr().err
    assert message.startswith("Timeout (") and "in test_stacks_of_who_is_late" in message


@pytest.mark.parametrize("seconds", [0.1, None])
def test_who_is_in_time_says_nothing(seconds: float | None, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), stacks_after(seconds):
        raise KeyError
    time.sleep(0.2)
    assert capfd.readouterr().err == ""


def test_a_late_call_in_this_process_continues(capfd: pytest.CaptureFixture[str]) -> None:
    with LocalBackend() as backend:
        group = backend.start_group("toy", ResourcePool((1,), "cpu", "p"), Toy)
        assert group.call(worker_call(Toy.note, "x", pause=0.2), limit=Limit(0.05)).result() == [1]
    assert "in note" in capfd.readouterr().err


def test_the_time_is_that_of_all_ranks_together(capfd: pytest.CaptureFixture[str]) -> None:
    with LocalBackend() as backend:
        group = backend.start_group("toy", ResourcePool((3,), "cpu", "p"), Toy)
        assert group.call(worker_call(Toy.note, "x", pause=0.15), limit=Limit(0.2)).result() == [1, 1, 1]
    assert "in note" in capfd.readouterr().err
