"""Requests of clients on the rollout engines: queued by the HTTP thread, generated tick by tick by the main thread.

Requests enter and leave the engines between ticks (continuous batching). What was sampled is given to the event loop once per
tick, so that a response costs nothing while it is generated, unless its client reads along.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from queue import Empty, SimpleQueue
from typing import Literal

import torch
from torch import Tensor

from trainer.rollout.remote_rollout import STEPS, RemoteRollout, RolloutFlow
from trainer.serving.request_queue import ServerStopping
from workers.batch import Batch
from workers.rollout.base import Sampling

_POLL_SECONDS = 0.2  # seconds between checks that the HTTP thread is alive
_TICK_SECONDS = 0.1
"""Of a tick, about: the time until a request enters and until a client gets new tokens, against the cost of a call."""


class TooManyRequests(Exception):
    """As many responses wait as may."""


@dataclass(frozen=True, slots=True)
class Update:
    """Tokens of a response since the last update. finish_reason: None: it continues."""

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: Literal["stop", "length"] | None


@dataclass(slots=True)
class Generation:
    """A response that is wanted. deliver: called in the event loop with each update, or with None if the server stops.

    reads_along: wants tokens as they are generated. sent: number of tokens that were delivered.
    """

    prompt_ids: Sequence[int]
    sampling: Sampling
    seed: int
    deliver: Callable[[Update | None], None]
    reads_along: bool
    id: int = -1
    sent: int = 0


def tick_steps(seconds: float, steps: int) -> int:
    """Engine steps of the next tick. seconds, steps: of the last one."""
    return max(1, min(STEPS, round(steps * _TICK_SECONDS / seconds)))


class ModelEngine:
    """The engines of a model server. ``submit`` and ``cancel`` are called in the event loop, ``work`` in the main thread."""

    def __init__(self, rollout: RemoteRollout, sampling: Sampling, *, most: int) -> None:
        """sampling: stop tokens of all requests, and the expected length. most: responses that run and wait together."""
        self.most = most
        self.counts = {"requests": 0, "responses": 0, "tokens": 0}
        self.rollout, self.sampling = rollout, sampling
        self._inbox: SimpleQueue[list[Generation] | list[int]] = SimpleQueue()
        """Generations with the same prompt to begin, or ids to end."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ids = count()
        self._unfinished: set[int] = set()
        """Of the event loop."""
        self._open: dict[int, Generation] = {}
        """Of the main thread."""
        self._closed = False

    # The event loop

    @property
    def unfinished(self) -> int:
        return len(self._unfinished)

    def submit(self, groups: Sequence[list[Generation]]) -> None:
        """Queue responses, in groups with the same prompt. Raises TooManyRequests, ServerStopping."""
        if self._closed:
            raise ServerStopping
        if len(self._unfinished) + sum(map(len, groups)) > self.most:
            raise TooManyRequests
        self._loop = asyncio.get_running_loop()
        self.counts["requests"] += 1
        for group in groups:
            for generation in group:
                generation.id = next(self._ids)
                self._unfinished.add(generation.id)
            self._inbox.put(group)
        # It may have closed since the check above: what it did not take is refused here.
        if self._closed:
            self._refuse(list(chain.from_iterable(groups)))

    def cancel(self, ids: Iterable[int]) -> None:
        """End responses whose client has gone; those that have ended are ignored."""
        if gone := [id for id in ids if id in self._unfinished]:
            self._unfinished.difference_update(gone)
            self._inbox.put(gone)

    def _deliver(self, updates: Sequence[tuple[Generation, Update]]) -> None:
        for generation, update in updates:
            if generation.id not in self._unfinished:  # cancelled
                continue
            self.counts["tokens"] += len(update.token_ids)
            if update.finish_reason is not None:
                self._unfinished.discard(generation.id)
                self.counts["responses"] += 1
            generation.deliver(update)

    def _refuse(self, generations: Sequence[Generation]) -> None:
        for generation in generations:
            if generation.id in self._unfinished:
                self._unfinished.discard(generation.id)
                generation.deliver(None)

    # The main thread

    def work(self, is_running: Callable[[], bool]) -> None:
        """Generate until ``is_running`` is false; responses that are unfinished then are refused."""
        flow = self.rollout.flow(self.sampling, self._requests, expected=0, replaces=False)
        try:
            steps = 1
            while is_running():
                before = len(self._open)
                self._take(flow, wait=not before)
                # Most requests are new: those that come with them do not wait longer than for the first step.
                if len(self._open) > 2 * before:
                    steps = 1
                streams = any(generation.reads_along for generation in self._open.values())
                begun = time.perf_counter()
                if flow.start(steps, streams=streams):
                    ended = flow.wait()
                    self._send(flow, ended, flow.new)
                    steps = tick_steps(time.perf_counter() - begun, steps)
        finally:
            # Set before the inbox is emptied: later requests are refused by ``submit``.
            self._closed = True
            left = [*self._open.values()]
            while not self._inbox.empty():
                left += [item for item in self._inbox.get() if isinstance(item, Generation)]
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._refuse, left)

    def _take(self, flow: RolloutFlow, *, wait: bool) -> None:
        """Admit what is in the inbox. wait: for a moment, because there is nothing else to do."""
        try:
            item = self._inbox.get(timeout=_POLL_SECONDS) if wait else self._inbox.get_nowait()
            while True:
                generations = [one for one in item if isinstance(one, Generation)]
                if generations:
                    self._open |= {generation.id: generation for generation in generations}
                    flow.admit([generation.id for generation in generations], len(generations[0].prompt_ids))
                else:
                    ids = [one for one in item if isinstance(one, int) and self._open.pop(one, None) is not None]
                    flow.forget(ids)
                item = self._inbox.get_nowait()
        except Empty:
            return

    def _requests(self, ids: Sequence[int]) -> Batch:
        """Rows of requests, see RolloutRole.advance."""
        chosen = [self._open[id] for id in ids]
        sampling = [generation.sampling for generation in chosen]
        return Batch(
            lengths=torch.tensor([len(generation.prompt_ids) for generation in chosen]),
            tokens={"input_ids": torch.tensor([token for generation in chosen for token in generation.prompt_ids])},
            rows={
                "id": torch.tensor(ids),
                "seed": torch.tensor([generation.seed for generation in chosen]),
                "greedy": torch.zeros(len(chosen), dtype=torch.bool),  # a temperature of 0 is
                "temperature": torch.tensor([one.temperature for one in sampling], dtype=torch.float64),
                "top_k": torch.tensor([one.top_k for one in sampling]),
                "top_p": torch.tensor([one.top_p for one in sampling], dtype=torch.float64),
                "max_tokens": torch.tensor([one.max_tokens for one in sampling]),
            },
        )

    def _send(self, flow: RolloutFlow, ended: Sequence[Batch], new: Sequence[Batch]) -> None:
        """Give out what a tick has sampled."""
        updates: list[tuple[Generation, Update]] = []
        for part in new:
            for generation, ids, log_probs in self._rows(part):
                if generation.reads_along:
                    generation.sent += len(ids)
                    updates.append((generation, Update(ids, log_probs, None)))
        for part in ended:
            finished = dict(zip(part.rows["id"].tolist(), part.rows["finished"].tolist(), strict=True))
            for generation, ids, log_probs in self._rows(part):
                sent = generation.sent  # an ended response has all of its tokens
                reason: Literal["stop", "length"] = "stop" if finished[generation.id] else "length"
                updates.append((generation, Update(ids[sent:], log_probs[sent:], reason)))
                del self._open[generation.id]
            flow.forget(finished)
        if updates and self._loop is not None:
            self._loop.call_soon_threadsafe(self._deliver, updates)

    def _rows(self, part: Batch) -> Iterator[tuple[Generation, list[int], list[float]]]:
        """Token ids and log-probs of responses that were not cancelled."""
        columns = (map(Tensor.tolist, part.split_rows(name)) for name in ("input_ids", "rollout_log_probs"))
        for id, ids, log_probs in zip(part.rows["id"].tolist(), *columns, strict=True):
            if id in self._open:
                yield self._open[id], ids, log_probs
