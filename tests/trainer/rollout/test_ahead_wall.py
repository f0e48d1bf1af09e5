"""Generation ahead in wall clock, on simulated replicas of random speeds that may die: the bound of staleness, idle times."""

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

import pytest

import trainer.rollout.remote_rollout as remote_rollout
from scripts.bench.rollout_flow import Settings, Simulation
from tests.trainer.rollout.test_ahead import Run, staleness
from tests.trainer.rollout.test_partial import TICK, Buffer, Engine, Flow, groups_of
from tests.trainer.rollout.test_sampler import KINDS, Case, Judge, make
from trainer.rollout.ahead import RolloutsAhead
from trainer.rollout.partial import TokenCounts
from trainer.run.timing import Phases
from workers.batch import Batch
from workers.controller.local_backend import LocalBackend
from workers.rollout.base import Sampling


@pytest.fixture(scope="module")
def case() -> Case:
    """Composed once."""
    return make(["mixed"], groups=1, per_round=1)


@dataclass
class Replicas(Engine):
    """Replicas whose ticks take simulated seconds, 1 to 9 at random. deaths: probability at a tick; all are alive in a new flow."""

    in_step: bool = False
    n_replicas: int = 2
    deaths: float = 0.0
    numbers: random.Random = field(default_factory=lambda: random.Random(0))
    now: float = 0.0
    n_lost: int = 0

    def flow(self, sampling: Sampling, requests: Callable[[Sequence[int]], Batch], **options: Any) -> "ReplicaFlow":
        assert options["in_step"] is self.in_step
        return ReplicaFlow(self, requests, may_die=not options["replaces"])


class ReplicaFlow(Flow):
    """Each replica has ticks of its own. The requests of one that dies return nothing."""

    def __init__(self, engine: Replicas, requests: Callable[[Sequence[int]], Batch], *, may_die: bool) -> None:
        super().__init__(engine, requests)
        self.replicas, self.may_die = engine, may_die
        self.held: dict[int, list[int]] = {replica: [] for replica in range(engine.n_replicas)}
        self.ends: dict[int, float] = {}
        """End of the tick of each replica that is in one."""

    def start(self) -> bool:
        if idle := self.held.keys() - self.ends.keys():
            for id in self.new:
                min((self.held[replica] for replica in idle), key=len).append(id)
            super().start()
        for replica in idle:
            if self.held[replica]:
                self.ends[replica] = self.replicas.now + self.replicas.numbers.randint(1, 9)
        return bool(self.ends)

    def wait(self) -> list[Batch]:
        replica = min(self.ends, key=lambda one: (self.ends[one], one))
        self.replicas.now = max(self.replicas.now, self.ends.pop(replica))
        if self.may_die and self.replicas.numbers.random() < self.replicas.deaths:
            self.replicas.n_lost += 1
            for id in self.held.pop(replica):
                del self.left[id], self.sampled[id]
            return []
        for id in self.held[replica][: self.engine.slots]:
            self.sampled[id] += self.left[id][:TICK]
            self.left[id] = self.left[id][TICK:]
        ended = [id for id in self.held[replica] if not self.left[id]]
        self.held[replica] = [id for id in self.held[replica] if self.left[id]]
        return [self.pop(ended)] if ended else []

    def suspend(self) -> tuple[list[Batch], list[Batch]]:
        ended = [part for _ in range(len(self.ends)) for part in self.wait()]
        return ended, [self.pop([*self.left])]


class WallRun(Run):
    """A run in simulated time, without a thread. generated: how often an update began, and the bound was reached before its end."""

    def __init__(self, case: Case, seed: int = 0, *, deaths: float = 0.0, clock: Literal["logical", "wall"] = "wall", **of: Any) -> None:
        super().__init__(case, **of)
        slots, numbers = of.get("slots", 12), random.Random(seed)
        self.engine = Replicas(slots, in_step=clock == "logical", n_replicas=numbers.randint(1, 3), deaths=deaths, numbers=numbers)
        options = {"groups": self.policy.groups, "oversubmit": of.get("oversubmit", 1.5)}
        self.bound = of.get("max_staleness", 2)
        self.policy = RolloutsAhead(self.buffer, **options, max_staleness=self.bound, clock=clock)
        self.logical, self.waited = clock == "logical", 0

    def step_of(self, update_seconds: float) -> Batch:
        """The next step, whose update takes simulated seconds."""
        self.step += 1
        engine = cast(Replicas, self.engine)
        self.sampler.rollout, self.sampler.policy = cast(Any, engine), self.policy
        self.sampler.rewards = cast(Any, self.judge(KINDS))
        batch = self.sampler.next_batch(self.step, self.stream, Phases())
        end, lost = engine.now + update_seconds, engine.n_lost

        def ended() -> bool:
            assert len(self.buffer) <= self.bound * self.policy.groups, "besides the batch of the update"
            return engine.now >= end

        until = None if self.logical else ended
        for _ in self.policy.generate(self.sampler, self.step + 1, self.stream, TokenCounts(), until, replaces=False):
            pass
        if not self.logical and engine.now < end and engine.n_lost == lost:
            assert len(self.buffer) == self.bound * self.policy.groups and self.buffer.n_unfinished == 0, "nothing is left to do"
            self.waited += 1
        engine.now = max(end, engine.now)
        engine.version = self.step
        return batch


@pytest.mark.parametrize("clock", ["logical", "wall"])
def test_every_ordinal_is_trained_once_and_never_staler_than_the_bound(clock: Literal["logical", "wall"], case: Case) -> None:
    """With kills in between, updates of random length, and replicas that die during them."""
    n_waited = n_lacking = n_beyond = n_lost = 0
    reached = set[tuple[int, int]]()
    for seed in range(150):
        numbers = random.Random(seed)
        groups, bound = numbers.randint(1, 6), numbers.randint(1, 4)
        options = {"oversubmit": numbers.choice([1.0, 1.5, 3.0]), "slots": numbers.choice([6, 16, 60])}
        deaths = numbers.choice([0.0, 0.0, 0.05, 0.3])
        run = WallRun(case, seed, deaths=deaths, clock=clock, groups=groups, max_staleness=bound, **options)
        trained: list[int] = []
        for _ in range(6):
            batch = run.step_of(numbers.choice([0.0, 5.0, 30.0, 500.0]))
            trained += groups_of(batch)
            assert len(trained) == len(set(trained)) == groups * run.step
            in_flight = run.buffer.arrays()["ordinal"].tolist()
            assert sorted(trained + in_flight) == run.buffer.admitted == [*range(len(run.buffer.admitted))]
            versions = batch.tokens["weight_version"][batch.tokens["response_mask"].bool()]
            assert staleness(batch) == run.step - 1 - int(versions.min()) <= bound
            assert int(versions.max()) < run.step
            reached.add((bound, staleness(batch)))
            ready = len(run.buffer.complete())
            n_lacking, n_beyond = n_lacking + (ready < groups), n_beyond + (ready > groups)
            if numbers.random() < 0.3:
                run.resume(run.state)
        n_waited, n_lost = n_waited + run.waited, n_lost + cast(Replicas, run.engine).n_lost
    assert reached >= {(bound, staleness) for bound in (1, 2, 3, 4) for staleness in range(bound + 1)} - {(4, 4)}
    assert n_lost > 50 and n_lacking > 50, "what a batch lacks is generated after the update"
    assert clock == "logical" or (n_waited > 50 and n_beyond > 50)
