"""Simulated steps of a plan: sampled response lengths, the trainer's own rollout scheduler, engines in simulated time.

Replicas take their decode steps in ticks and wait for each other after each, as ``RolloutFlow`` does: a tick takes the time of
the replica with the most sequences. Phases other than generation take their planned time in every step. A replica's result
changes nothing in the scheduler unless responses ended or prompts wait, so ticks between such events are passed in one go: the
work is proportional to the responses, not to replicas times ticks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

import numpy as np

from trainer.planner.search import RankedPlan
from trainer.planner.step_time import ACTOR, EnginePlan, engines, schedule, step_seconds
from trainer.planner.time_model import ResponseLengths, exponential_scale
from trainer.rollout.remote_rollout import STEPS
from trainer.rollout.scheduler import Ended, RolloutScheduler


class DecodeSlots:
    """Requests of engines that take decode steps at the same time. Each engine runs ``slots`` of them; others wait in order."""

    def __init__(self, n_engines: int, slots: int) -> None:
        self._slots = slots
        self._waiting: list[deque[tuple[int, int]]] = [deque() for _ in range(n_engines)]
        self.running = [0] * n_engines
        """Number of running requests by engine."""
        self._ends: list[tuple[int, int, int]] = []
        """Heap of (decode step after which the response ends, engine, request)."""

    def submit(self, engine: int, request: int, tokens: int) -> None:
        """Add a request that ends after ``tokens`` decode steps."""
        self._waiting[engine].append((request, tokens))

    def fill(self, engine: int, now: int) -> list[int]:
        """Start waiting requests in free slots; returns them."""
        started = []
        waiting = self._waiting[engine]
        while waiting and self.running[engine] < self._slots:
            request, tokens = waiting.popleft()
            heappush(self._ends, (now + tokens, engine, request))
            self.running[engine] += 1
            started.append(request)
        return started

    @property
    def next_end(self) -> int | None:
        """Decode step after which the next response ends."""
        return self._ends[0][0] if self._ends else None

    def pop(self) -> tuple[int, int, int]:
        """Take the request that ends next: (decode step, engine, request)."""
        found = heappop(self._ends)
        self.running[found[1]] -= 1
        return found

    def take(self) -> dict[int, int]:
        """Take all requests; returns the decode steps after which running ones would end."""
        running = {request: end for end, _, request in self._ends}
        self._ends, self.running = [], [0] * len(self.running)
        for queue in self._waiting:
            queue.clear()
        return running


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """Seconds of each step and of its generation, and of the first step (seconds since its start, running sequences)."""

    steps: Sequence[float]
    generation: Sequence[float]
    running: Sequence[tuple[float, int]]


def simulate(plan: RankedPlan, steps: int, seed: int = 0) -> SimulatedRun:
    """Run ``steps`` steps of a plan with sampled lengths of responses."""
    draws = np.random.default_rng(seed)
    planned = engines(plan.config, plan.place, plan.shapes[ACTOR], plan.cluster.hardware, plan.lengths)
    traces: list[list[tuple[float, int]]] = []
    whole, generation = [], []
    for _ in range(steps):
        traces.append([])
        lengths = sampled(plan.lengths, planned.prompts * planned.n, draws)
        seconds = generate(planned, plan.lengths.prompt, lengths, traces[-1]) + plan.generation.parts["controller"]
        answers = replace(plan.generation, parts={"decode": seconds})
        whole.append(step_seconds(schedule(plan.config, plan.place, [answers, *plan.others])))
        generation.append(seconds)
    return SimulatedRun(whole, generation, traces[0])


def sampled(lengths: ResponseLengths, count: int, draws: np.random.Generator) -> list[int]:
    """Lengths of ``count`` responses: geometric, truncated at the maximum."""
    if lengths.response >= lengths.most:
        return [lengths.most] * count
    scale = exponential_scale(lengths.response, lengths.most)
    found: list[int] = np.ceil(draws.exponential(scale, count)).clip(1, lengths.most).astype(int).tolist()
    return found


def generate(engines: EnginePlan, prompt: float, lengths: Sequence[int], trace: list[tuple[float, int]]) -> float:
    """Seconds until all responses have ended.

    lengths: tokens of each response, those to one prompt in a row. trace: gets (seconds, running sequences) of each tick.
    """
    decoder, n = engines.decoder, engines.n
    scheduler = RolloutScheduler(
        n_replicas=engines.replicas, slots=engines.max_num_seqs, max_tokens=max(lengths), balance=engines.balance
    )
    for first in range(0, len(lengths), n):
        scheduler.admit(range(first, first + n), int(prompt))
    slots = DecodeSlots(engines.replicas, decoder.slots)
    called: set[int] = set()
    seconds, now, running, began = 0.0, 0, 0, 0  # began: sum of the decode steps at which the running sequences began
    while True:
        calls = scheduler.calls()
        called.update(calls)
        if not called:
            return seconds
        for replica, rows in calls.items():
            for row in rows:
                slots.submit(replica, row, lengths[row])
            started = len(slots.fill(replica, now)) if rows else 0
            running, began = running + started, began + started * now
        entered = max(map(len, calls.values()), default=0)
        seconds += decoder.prefill(entered / n * prompt, prompt)
        trace.append((seconds, running))
        first_end = slots.next_end
        assert first_end is not None, "replicas with calls have requests"
        until = now + -(-(first_end - now) // STEPS) * STEPS
        # Their tokens on average, in the middle of the ticks.
        most, context = max(slots.running), prompt + (now + until) / 2 - began / running
        ended: dict[int, list[int]] = {}
        last = now
        while (end := slots.next_end) is not None and end <= until:
            last, replica, row = slots.pop()
            ended.setdefault(replica, []).append(row)
            started = len(slots.fill(replica, last))
            running, began = running + started - 1, began + started * last - (last - lengths[row])
        # Engines without requests return before the end of the tick.
        steps = (until if running else last) - now
        turns = math.ceil(steps / STEPS) if decoder.call_steps else 0
        seconds += steps * decoder.step(most, context) + turns * decoder.group.hardware.software.turn
        now = until
        # Replicas in which nothing ended report too where prompts wait: their next call can begin with these.
        reporting = called if scheduler.waiting else ended
        scheduler.record({i: Ended(ended.get(i, ()), [lengths[row] for row in ended.get(i, ())]) for i in sorted(reporting)})
        called.difference_update(reporting)
