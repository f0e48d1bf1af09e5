"""Calls of a process that answers one after the other."""

import subprocess
from collections.abc import Iterator
from multiprocessing import Pipe
from threading import Event, Thread

import pytest

from workers.rollout.sglang.sglang_calls import Calls, EngineDied, answer_calls


class Target:
    def __init__(self) -> None:
        self.go = Event()
        self.done: list[int] = []

    def work(self, number: int) -> int:
        assert self.go.wait(10)
        self.done.append(number)
        return number

    def fail(self, words: str) -> None:
        raise ValueError(words)


@pytest.fixture
def target() -> Target:
    return Target()


@pytest.fixture
def calls(target: Target) -> Iterator[Calls]:
    actual, expected = Pipe()
    thread = Thread(target=answer_calls, args=(expected, target))
    thread.start()
    yield Calls(subprocess.Popen(["false"]), actual)
    target.go.set()
    actual.close()
    thread.join(10)
    assert not thread.is_alive(), "it ends when no caller is left"


def test_the_next_call_lies_ready(calls: Calls, target: Target) -> None:
    for number in range(3):
        calls.begin("work", number)
    assert target.done == [], "no call was waited for"
    target.go.set()
    assert calls.wait(left=2) == 0
    assert calls.wait(left=2) is None, "no more are waited for than have to be"
    assert calls.call("work", 3) == 3 and target.done == [0, 1, 2, 3]
    assert calls.wait() is None


def test_a_failure_is_raised_once_and_later_results_are_dropped(calls: Calls, target: Target) -> None:
    target.go.set()
    for words in ("first", "second"):
        calls.begin("fail", words)
    calls.begin("work", 1)
    with pytest.raises(RuntimeError, match=r"SGLang failed in fail:\nTraceback(.|\n)*ValueError: first"):
        calls.wait(left=1)
    assert calls.call("work", 2) == 2 and target.done == [1, 2]


def test_who_has_died_is_named() -> None:
    actual, expected = Pipe()
    calls = Calls(subprocess.Popen(["false"]), actual)
    expected.close()
    with pytest.raises(EngineDied, match=r"SGLang died in work: process \d+ ended with 1"):
        calls.call("work", 1)
