"""Requests that wait together are scored together, and none is left waiting."""

import asyncio
import time
from threading import Thread
from typing import Any

import pytest

from trainer.rewards.scoring import Answer, Score
from trainer.serving.request_queue import Closed, Desk


def answers(n: int) -> list[Answer]:
    return [Answer("", str(i), None, {}, True) for i in range(n)]


def asked(desk: Desk, *sizes: int) -> tuple[Thread, list[Any]]:
    """Requests of so many answers, in a thread with an event loop. Their results or errors come into the list."""
    results: list[Any] = []

    async def all_of_them() -> None:
        results.extend(await asyncio.gather(*(desk.scores(answers(n)) for n in sizes), return_exceptions=True))

    thread = Thread(target=lambda: asyncio.run(all_of_them()), daemon=True)
    thread.start()
    return thread, results


def all_wait(desk: Desk, n: int) -> None:
    while desk._queue.qsize() < n:
        time.sleep(0.001)


def all_taken(desk: Desk, n: int) -> list[list[int]]:
    """Sizes of n requests, as they are taken together, when all of them wait."""
    all_wait(desk, n)
    sizes: list[list[int]] = []
    while sum(map(len, sizes)) < n:
        taken = desk.take(1.0)
        for request in taken:
            request.scores.set_result([Score(float(len(request.answers)), {}, None)] * len(request.answers))
        sizes.append([len(request.answers) for request in taken])
    return sizes


def test_what_waits_together_is_taken_together_up_to_the_batch_size() -> None:
    desk = Desk(batch_size=8)
    thread, results = asked(desk, 3, 5, 1, 20, 2)
    assert all_taken(desk, 5) == [[3, 5], [1], [20], [2]]
    thread.join(5.0)
    assert [len(scores) for scores in results] == [3, 5, 1, 20, 2]
    assert desk.take(0.01) == []


def test_who_still_waits_is_told_that_it_closes() -> None:
    desk = Desk(batch_size=4)
    thread, results = asked(desk, 3, 3, 3)
    all_wait(desk, 3)
    taken = desk.take(1.0)
    desk.close(taken)
    thread.join(5.0)
    assert not thread.is_alive() and [type(result) for result in results] == [Closed] * 3
    with pytest.raises(Closed):
        asyncio.run(desk.scores(answers(1)))
