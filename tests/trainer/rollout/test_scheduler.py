"""RolloutScheduler against engines that are a formula: a decode step of n sequences takes a + b n seconds."""

import heapq
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from trainer.rollout.scheduler import Balance, Ended, RolloutScheduler

STEPS = 32
A, B = 11e-3, 22e-6  # seconds: an H200's step of a 0.5B model, and what each running sequence adds to it


@dataclass
class FakeEngine:
    """Continuous batching in ``slots`` slots, first come first served."""

    slots: int
    per_sequence: float = B
    waiting: list[tuple[int, int]] = field(default_factory=list)
    ends: list[tuple[int, int, int]] = field(default_factory=list)
    step: int = 0
    seconds: float = 0.0

    def advance(self, new: list[tuple[int, int]], steps: int) -> Ended:
        """new: (row, tokens of its response)."""
        self.waiting += new
        done: list[tuple[int, int]] = []
        for _ in range(steps):
            while self.waiting and len(self.ends) < self.slots:
                row, length = self.waiting.pop(0)
                heapq.heappush(self.ends, (self.step + length, row, length))
            if not self.ends:
                break
            self.seconds += A + self.per_sequence * len(self.ends)
            self.step += 1
            while self.ends and self.ends[0][0] <= self.step:
                _, row, length = heapq.heappop(self.ends)
                done.append((row, length))
        return Ended([row for row, _ in done], [length for _, length in done])


def lengths_by_group(n_groups: int, *, mean: float, longest: int, seed: int) -> list[int]:
    """Geometric lengths of 8 responses per prompt; the prompts' means are exponential, as easy and hard ones have them."""
    drawn = random.Random(seed)
    means = [max(1.0, drawn.expovariate(1 / mean)) for _ in range(n_groups)]
    return [min(longest, 1 + int(drawn.expovariate(1 / each))) for each in means for _ in range(8)]


def scheduler_of(n_rows: int, group_size: int, prompt: int, **settings: Any) -> RolloutScheduler:
    """Scheduler that has admitted groups of prompts of ``prompt`` tokens."""
    scheduler = RolloutScheduler(**settings)
    for first in range(0, n_rows, group_size):
        scheduler.admit(range(first, first + group_size), prompt)
    return scheduler


def simulate(
    lengths: list[int], balance: Balance, *, n_replicas: int = 2, slots: int = 256, group_size: int = 8
) -> tuple[float, dict[int, int]]:
    """(seconds, replica of each row). A turn takes as long as its slowest replica, as where placement is to be repeatable."""
    scheduler = scheduler_of(len(lengths), group_size, 100, n_replicas=n_replicas, slots=slots, max_tokens=8192, balance=balance)
    engines = [FakeEngine(slots) for _ in range(n_replicas)]
    place: dict[int, int] = {}
    seconds = 0.0
    while calls := scheduler.calls():
        before = [engine.seconds for engine in engines]
        ended = {i: engines[i].advance([(row, lengths[row]) for row in rows], STEPS) for i, rows in calls.items()}
        scheduler.record(ended)
        seconds += max(engine.seconds - start for engine, start in zip(engines, before, strict=True))
        place |= {row: i for i, rows in calls.items() for row in rows}
    assert scheduler.unfinished == 0
    return seconds if balance == "tokens" else max(engine.seconds for engine in engines), place


@pytest.mark.parametrize("balance", ["static", "tokens"])
def test_every_row_is_submitted_once_and_groups_stay_together(balance: Balance) -> None:
    lengths = lengths_by_group(40, mean=100, longest=800, seed=0)
    _, place = simulate(lengths, balance, n_replicas=3, slots=16)
    assert sorted(place) == list(range(len(lengths)))
    assert all(len({place[row] for row in range(start, start + 8)}) == 1 for start in range(0, len(lengths), 8))
    assert set(place.values()) == {0, 1, 2}


def turn(scheduler: RolloutScheduler, ended: dict[int, Ended]) -> dict[int, list[int]]:
    scheduler.record(ended)
    return scheduler.calls()


def test_static_placement_rotates_and_submits_everything_at_once() -> None:
    scheduler = scheduler_of(10, 2, 3, n_replicas=2, slots=1, max_tokens=5, balance="static")
    assert scheduler.calls() == {0: [0, 1, 4, 5, 8, 9], 1: [2, 3, 6, 7]}
    assert turn(scheduler, {1: Ended([2, 3, 6], [1] * 3)}) == {1: []}, "the call on replica 0 is not over"
    assert turn(scheduler, {1: Ended([7], [1])}) == {} and scheduler.unfinished == 6
    assert turn(scheduler, {0: Ended([0, 1, 4, 5, 8, 9], [1] * 6)}) == {} and scheduler.unfinished == 0


def test_one_replica_gets_everything_in_order_however_it_is_balanced() -> None:
    for balance in ("static", "tokens"):
        scheduler = scheduler_of(6, 2, 3, n_replicas=1, slots=8, max_tokens=5, balance=balance)
        assert scheduler.calls() == {0: [0, 1, 2, 3, 4, 5]}


@pytest.mark.parametrize(
    ("length", "group_size", "most"),
    [
        pytest.param(63, 8, 320, id="short responses: others wait in the engine, so that slots are filled within a turn"),
        pytest.param(64, 8, 256, id="longer ones: requests enter between turns only"),
        pytest.param(64, 100, 340, id="large groups: more than a sixteenth of the slots would be empty"),
    ],
)
def test_rows_that_a_replica_holds(length: int, group_size: int, most: int) -> None:
    rows = 60 * group_size
    scheduler = scheduler_of(rows, group_size, 3, n_replicas=1, slots=256, max_tokens=length, balance="tokens")
    held = []
    while scheduler.calls():
        held.append(scheduler.held(0))
        done = scheduler.rows(0)[:group_size]
        scheduler.record({0: Ended(done, [length] * len(done))})
    assert max(held) <= most and max(held) > most - group_size and scheduler.unfinished == 0


@pytest.mark.parametrize(("n_groups", "slots"), [(128, 128), (256, 64)])
def test_two_replicas_take_the_time_of_one_queue_over_both(n_groups: int, slots: int) -> None:
    """Ideal: a replica takes the next response the moment a slot is free, wherever that is."""
    ratios: dict[Balance, list[float]] = {"static": [], "tokens": []}
    for seed in range(4):
        lengths = lengths_by_group(n_groups, mean=1024, longest=8192, seed=seed)
        both = FakeEngine(2 * slots, per_sequence=B / 2)
        both.advance(list(enumerate(lengths)), sum(lengths))
        for balance, found in ratios.items():
            found.append(simulate(lengths, balance, slots=slots)[0] / both.seconds)
    print(ratios)
    assert max(ratios["tokens"]) < 1.05 and max(ratios["tokens"]) < max(ratios["static"])


def test_forgotten_rows_free_their_slots_unless_their_replica_has_a_call() -> None:
    scheduler = RolloutScheduler(n_replicas=1, slots=2, max_tokens=100, balance="tokens")
    scheduler.admit([0, 1], 10)
    scheduler.admit([2], 10)
    scheduler.admit([3, 4], 10)
    assert scheduler.calls() == {0: [0, 1]}
    # Waiting rows are forgotten at any time, and those of a replica that has a call later.
    assert scheduler.forget([1, 3]) == {} and scheduler.has(1) and scheduler.unfinished == 4
    scheduler.record({0: Ended([0], [5])})
    assert scheduler.forget([0, 1]) == {0: [1]} and not scheduler.has(1)
    assert scheduler.calls() == {0: [2, 4]}
    scheduler.record({0: Ended([2, 4], [5, 5])})
    assert scheduler.unfinished == 0 and scheduler._prompt_tokens == [0.0]
    scheduler.forget([2, 4])
    assert scheduler._last == {}
    assert scheduler.calls() == {} and scheduler.calls(also=[0]) == {0: []}


@pytest.mark.parametrize("balance", ["tokens", "static"])
def test_rows_that_ended_continue_on_their_replica_while_it_has_room(balance: Balance) -> None:
    """The next turn of a conversation: its replica has computed most of the prompt, also if others have less to do."""
    scheduler = RolloutScheduler(n_replicas=2, slots=4, max_tokens=100, balance=balance)
    for row in range(4):
        scheduler.admit([row], 10)
    assert scheduler.calls() == {0: [0, 2], 1: [1, 3]}
    scheduler.record({0: Ended([0, 2], [50, 50]), 1: Ended([1], [50])})
    scheduler.admit([1], 60)
    assert scheduler.calls() == {1: [1]}, "replica 0 is empty"
    scheduler.record({1: Ended([1], [50])})
    scheduler.admit([1], 110)
    scheduler.lose(1)
    assert scheduler.calls() == {0: [1]}


def test_a_row_that_continues_counts_when_the_next_group_is_placed() -> None:
    scheduler = RolloutScheduler(n_replicas=2, slots=8, max_tokens=100, balance="tokens")
    scheduler.admit([0], 5)
    assert scheduler.calls() == {0: [0]}
    scheduler.record({0: Ended([0], [80])})
    scheduler.admit([0], 5)
    scheduler.admit([1], 5)
    # Row 0 returns to its replica, which has more to do than the other one then.
    assert scheduler.calls() == {0: [0], 1: [1]}
