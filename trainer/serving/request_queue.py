"""Queue of scoring requests between the HTTP thread, which receives them, and the main thread, which owns the scorer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from trainer.rewards.scoring import Response, Score


class ServerStopping(Exception):
    """The server is stopping: what waits gets no answer."""


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """A queued request. scores: resolves to one score per response."""

    answers: Sequence[Response]
    scores: Future[list[Score]] = field(default_factory=Future)


class RequestQueue:
    """Request queue that forms batches."""

    def __init__(self, batch_size: int) -> None:
        """batch_size: maximum number of responses per batch; a larger single request forms a batch of its own."""
        self._batch_size = batch_size
        self._queue: SimpleQueue[QueuedRequest] = SimpleQueue()
        self._next: QueuedRequest | None = None  # a request that did not fit into the previous batch
        self._closed = False

    async def scores(self, answers: Sequence[Response]) -> list[Score]:
        """Queue a request and await its scores; called in the event loop. Raises ServerStopping."""
        if self._closed:
            raise ServerStopping
        waiting = QueuedRequest(answers)
        self._queue.put(waiting)
        return await asyncio.wrap_future(waiting.scores)

    def take(self, timeout: float) -> list[QueuedRequest]:
        """Take a batch of requests, oldest first; [] if none arrives within ``patience`` seconds."""
        try:
            taken = [self._next or self._queue.get(timeout=timeout)]
        except Empty:
            return []
        self._next, size = None, len(taken[0].answers)
        while self._next is None and not self._queue.empty():
            # A request is never split. One that does not fit is first in the next batch, so that the order is kept.
            waiting = self._queue.get()
            size += len(waiting.answers)
            if size <= self._batch_size:
                taken.append(waiting)
            else:
                self._next = waiting
        return taken

    def close(self, taken: Sequence[QueuedRequest]) -> None:
        """Fail all queued requests and those in ``taken`` with ServerStopping."""
        # Set before the queue is drained: later requests are refused at once instead of waiting for a scorer that has ended.
        self._closed = True
        waiting = [*taken, *([] if self._next is None else [self._next])]
        while not self._queue.empty():
            waiting.append(self._queue.get())
        for request in waiting:
            if not request.scores.done():
                request.scores.set_exception(ServerStopping())
