"""Requests that wait together are scored together, and none is left waiting."""

import asyncio
import time
from threading import Thread
from typing import Any

import pytest

from trainer.rewards.scoring import Response, Score
from trainer.serving.request_queue import RequestQueue, ServerStopping


def answers(n: int) -> list[Response]:
    return [Response("", str(i), None, {}, True) for i in range(n)]


def asked(queue: RequestQueue, *sizes: int) -> tuple[Thread, list[Any]]:
    """Requests of ``sizes`` responses, in a thread with an event loop. Their results or errors are appended to the list."""
    results: list[Any] = []

    async def all_of_them() -> None:
        results.extend(await asyncio.gather(*(queue.scores(answers(n)) for n in sizes), return_exceptions=True))

    thread = Thread(target=lambda: asyncio.run(all_of_them()), daemon=True)
    thread.start()
    return thread, results


def all_wait(queue: RequestQueue, n: int) -> None:
    while queue._queue.qsize() < n:
        time.sleep(0.001)


def all_taken(queue: RequestQueue, n: int) -> list[list[int]]:
    """Sizes of n requests, grouped as they are taken when all of them wait."""
    all_wait(queue, n)
    sizes: list[list[int]] = []
    while sum(map(len, sizes)) < n:
        taken = queue.take(1.0)
        for request in taken:
            request.scores.set_result([Score(float(len(request.answers)), {}, None)] * len(request.answers))
        sizes.append([len(request.answers) for request in taken])
    return sizes


def test_waiting_requests_are_taken_together_up_to_the_batch_size() -> None:
    queue = RequestQueue(batch_size=8)
    thread, results = asked(queue, 3, 5, 1, 20, 2)
    assert all_taken(queue, 5) == [[3, 5], [1], [20], [2]]
    thread.join(5.0)
    assert [len(scores) for scores in results] == [3, 5, 1, 20, 2]
    assert queue.take(0.01) == []


def test_waiting_requests_fail_when_the_queue_closes() -> None:
    queue = RequestQueue(batch_size=4)
    thread, results = asked(queue, 3, 3, 3)
    all_wait(queue, 3)
    taken = queue.take(1.0)
    queue.close(taken)
    thread.join(5.0)
    assert not thread.is_alive() and [type(result) for result in results] == [ServerStopping] * 3
    with pytest.raises(ServerStopping):
        asyncio.run(queue.scores(answers(1)))
