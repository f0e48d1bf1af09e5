"""Generation ahead in wall clock, on simulated replicas of random speeds that may die: the bound of staleness, idle times."""

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import pytest

import trainer.rollout.remote_rollout as remote_rollout
from scripts.bench.rollout_flow import Settings, Simulation
from tests.trainer.rollout.test_ahead import EVERY_STEP, Run, staleness
from tests.trainer.rollout.test_partial import TICK, Engine, Flow, groups_of
from tests.trainer.rollout.test_sampler import KINDS, Case, make
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
    """Replicas whose ticks take simulated seconds, 1 to 9 at random. deaths: probability at a tick. A new flow has all."""

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
                del self.left[id], self.sampled[id], self.versions[id]
            return []
        for id in self.held[replica][: self.engine.slots]:
            self.sampled[id] += self.left[id][:TICK]
            self.versions[id] += [self.engine.version] * len(self.left[id][:TICK])
            self.left[id] = self.left[id][TICK:]
        ended = [id for id in self.held[replica] if not self.left[id]]
        self.held[replica] = [id for id in self.held[replica] if self.left[id]]
        return [self.pop(ended)] if ended else []

    @property
    def has_lost(self) -> bool:  # type: ignore[override]
        return len(self.held) < self.replicas.n_replicas

    def settle(self) -> list[Batch]:
        return [part for _ in range(len(self.ends)) for part in self.wait()]

    def suspend(self) -> tuple[list[Batch], list[Batch]]:
        return self.settle(), [self.pop([*self.left])]


class WallRun(Run):
    """A run in simulated time, without a thread. waited: number of updates before whose end the bound was reached."""

    def __init__(
        self, case: Case, seed: int = 0, *, deaths: float = 0.0, clock: Literal["logical", "wall"] = "wall", **of: Any
    ) -> None:
        super().__init__(case, **of)
        slots, numbers = of.get("slots", 12), random.Random(seed)
        self.engine = Replicas(
            slots, in_step=clock == "logical", n_replicas=numbers.randint(1, 3), deaths=deaths, numbers=numbers
        )
        options = {"groups": self.policy.groups, "oversubmit": of.get("oversubmit", 1.5)}
        self.bound = of.get("max_staleness", 2)
        self.policy = RolloutsAhead(self.buffer, **options, max_staleness=self.bound, schedule=EVERY_STEP, clock=clock)
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
        for _ in self.policy.generate_ahead(self.sampler, self.step + 1, self.stream, TokenCounts(), until):
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
    for seed in range(40):
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
    assert reached >= {(bound, staleness) for bound in (1, 2, 3, 4) for staleness in range(bound + 1)} - {(4, 4)}, "rare"
    assert n_lost > 15 and n_lacking > 15, "what a batch lacks is generated after the update"
    assert clock == "logical" or (n_waited > 15 and n_beyond > 15)


def test_one_step_off_generates_no_more_than_the_next_batch(case: Case) -> None:
    """A long update: it is complete, of the weights before. A short one: the rest has the present weights."""
    run = WallRun(case, max_staleness=1)
    for seconds in (500.0, 500.0, 8.0, 0.0, 500.0):
        batch = run.step_of(seconds)
        versions = set(batch.tokens["weight_version"][batch.tokens["response_mask"].bool()].tolist())
        assert len(run.buffer) <= run.policy.groups and versions <= {max(0, run.step - 2), run.step - 1}
        if run.step == 5:
            assert versions == {4}, "nothing was generated during the update of step 4"
        assert run.step != 4 or versions == {2, 3}, "several versions in a batch"
        assert run.step not in (2, 3) or versions == {run.step - 2}
    assert run.waited == 3


def test_groups_that_wait_are_taken_by_tick_and_ordinal(case: Case) -> None:
    run, waited = WallRun(case, groups=4, max_staleness=8, oversubmit=2.0), 0
    for seconds in (60.0, 60.0, 10.0, 60.0, 0.0, 60.0):
        batch = run.step_of(seconds)
        taken = run.buffer.removed[-4:]
        assert groups_of(batch) == [group.ordinal for group in taken]
        keys = [(cast(int, group.tick), group.ordinal) for group in taken]
        assert keys == sorted(keys)
        waited += len(run.buffer.complete())
        later = [(cast(int, group.tick), group.ordinal) for group in run.buffer.complete()]
        assert later == sorted(later) and (not later or keys[-1] < later[0])
    assert waited > 12


def test_requests_of_lost_replicas_return_as_they_were_and_the_batch_is_completed_after_the_sync(case: Case) -> None:
    """Also if no replica is left."""
    for deaths in (0.5, 1.0):
        run = WallRun(case, 3, deaths=deaths, clock="logical", groups=6, max_staleness=1)
        run.step_of(1.0)
        before = run.buffer.arrays()
        engine = cast(Replicas, run.engine)
        assert engine.n_lost == engine.n_replicas if deaths == 1.0 else engine.n_lost >= 1
        assert deaths < 1.0 or before["input_ids"].tolist() == [], "tokens since the flow began are sampled again"
        assert deaths < 1.0 or (before["finished"] == -1).all()
        batch = run.step_of(1.0)
        assert len(groups_of(batch)) == 6 and (deaths < 1.0 or staleness(batch) == 0)


def test_generation_continues_after_the_batch_and_ends_with_the_tick_in_which_the_update_does(case: Case) -> None:
    """With a thread: the update lasts until a tick begins with more groups than a batch, which lasts until the trainer waits."""
    later, beyond, phases = list[float](), threading.Event(), Phases()

    class Waiting(Replicas):
        def flow(self, *args: Any, **options: Any) -> ReplicaFlow:
            found = super().flow(*args, **options)
            start = found.start

            def watched() -> bool:
                if beyond.is_set():
                    later.append(self.now)
                elif len(run.buffer.complete()) > run.policy.groups:
                    beyond.set()
                    deadline = time.monotonic() + 30.0
                    while "gen" not in phases.under_way:
                        assert time.monotonic() < deadline
                        time.sleep(0.001)
                return start()

            if not options["replaces"]:
                found.start = watched  # type: ignore[method-assign]
            return found

    run = WallRun(case, max_staleness=4, oversubmit=3.0)
    run.engine = Waiting(**vars(run.engine))
    run.step_of(0.0)
    with run.policy.generating(run.sampler, 2, run.stream, phases, {}):
        assert beyond.wait(10.0), "generation ended with the batch"
    assert later == [] and not [thread for thread in threading.enumerate() if thread.name == "generation ahead"]


SETTINGS = Settings(
    prompts=8, n=8, prompt_tokens=8, max_tokens=256, slots=32, replicas=1, oversubmit=1.5, max_age=4, a=5e-3, b=64e-6, c=16e-6,
    train=0.0, steps=16, warm_up=0,
)  # fmt: skip


def simulated(clock: Literal["logical", "wall"], updates: Sequence[float], folder: Path) -> dict[str, float]:
    """Simulated seconds of 16 steps, in total, and in which trainer and engine waited. updates: their seconds, in turn."""
    with LocalBackend() as backend:
        run = Simulation(SETTINGS, backend, folder, "partial")
        policy = RolloutsAhead(
            run.buffer, groups=SETTINGS.prompts, oversubmit=1.5, max_staleness=3, schedule=EVERY_STEP, clock=clock
        )
        run.sampler.policy = policy
        trainer_idle = engine_idle = 0.0
        for step in range(SETTINGS.steps):
            began = run.clock.seconds
            batch = run.step()
            assert batch.meta["metrics"]["rollout/staleness/max"] <= 3
            trainer_idle += run.clock.seconds - began
            end = run.clock.seconds + updates[step % len(updates)]

            def ended(end: float = end) -> bool:
                run.clock.meet()
                return run.clock.seconds >= end

            until = ended if clock == "wall" else None
            for _ in policy.generate_ahead(run.sampler, run.n_steps + 1, run.stream, TokenCounts(), until):
                pass
            run.clock.meet()
            trainer_idle += max(0.0, run.clock.seconds - end)
            engine_idle += max(0.0, end - run.clock.seconds)
            run.clock.seconds = max(end, run.clock.seconds)
    return {"total": run.clock.seconds, "trainer": trainer_idle, "engine": engine_idle}


@pytest.mark.parametrize("updates", [(1.0, 0.05), (3.0, 0.05)])
def test_sides_wait_less_than_with_the_logical_clock(
    updates: Sequence[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Updates of unequal length: the engine works in advance during a long one. A batch takes about half a second."""
    monkeypatch.setattr(remote_rollout, "STEPS", 8)
    logical, wall = (simulated(clock, updates, tmp_path) for clock in ("logical", "wall"))
    assert wall["trainer"] < 0.5 * logical["trainer"] and wall["engine"] < 0.7 * logical["engine"]
    if updates[0] == 1.0:
        assert logical["total"] / wall["total"] > 1.15 and wall["engine"] == 0
