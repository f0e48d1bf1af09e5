"""Where requests wait to be scored. They come from the thread that listens, and are scored by the one that owns the scorer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from trainer.rewards.scoring import Answer, Score


class Closed(Exception):
    """The server ends: nothing more is scored."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request. scores: what it waits for, one for each of its answers."""

    answers: Sequence[Answer]
    scores: Future[list[Score]] = field(default_factory=Future)


class Desk:
    def __init__(self, batch_size: int) -> None:
        """batch_size: answers that are taken together at most, unless one request has more."""
        self._batch_size = batch_size
        self._queue: SimpleQueue[Waiting] = SimpleQueue()
        self._next: Waiting | None = None  # it did not go together with those before it
        self._closed = False

    async def scores(self, answers: Sequence[Answer]) -> list[Score]:
        """For the event loop: waits until they are there. Raises Closed."""
        if self._closed:
            raise Closed
        waiting = Waiting(answers)
        self._queue.put(waiting)
        return await asyncio.wrap_future(waiting.scores)

    def take(self, patience: float) -> list[Waiting]:
        """Requests to be scored together, the oldest first; [] if none comes within ``patience`` seconds."""
        try:
            taken = [self._next or self._queue.get(timeout=patience)]
        except Empty:
            return []
        self._next, size = None, len(taken[0].answers)
        while self._next is None and not self._queue.empty():
            waiting = self._queue.get()
            size += len(waiting.answers)
            if size <= self._batch_size:
                taken.append(waiting)
            else:
                self._next = waiting
        return taken

    def close(self, taken: Sequence[Waiting]) -> None:
        """Those that wait, and those that were ``taken``, are told that they will get no scores."""
        self._closed = True
        waiting = [*taken, *([] if self._next is None else [self._next])]
        while not self._queue.empty():
            waiting.append(self._queue.get())
        for request in waiting:
            if not request.scores.done():
                request.scores.set_exception(Closed())
