"""Generation ahead on a simulated engine: every prompt is trained on once and in time, resumed runs, errors on either side."""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from tests.trainer.rollout.test_partial import Buffer, Engine, Flow, Slow, groups_of, mixture, same
from tests.trainer.rollout.test_sampler import KINDS, Case, Judge, make
from trainer.data.dataset import Prompt, PromptStream
from trainer.data.order import DataOrder
from trainer.rollout.ahead import RolloutsAhead, SyncSchedule
from trainer.run.timing import Phases
from workers.batch import Batch

EVERY_STEP = SyncSchedule()


@pytest.fixture(scope="module")
def case() -> Case:
    """Composed once."""
    return make(["mixed"], groups=1, per_round=1)


class Run:
    """A run whose training does nothing. steps: its number; None: without end. judge: gives the scores."""

    def __init__(
        self,
        case: Case,
        *,
        groups: int = 3,
        oversubmit: float = 1.5,
        max_staleness: int = 2,
        schedule: SyncSchedule = EVERY_STEP,
        slots: int = 12,
        steps: int | None = None,
        judge: type[Judge] = Judge,
        engine: type[Engine] = Engine,
    ) -> None:
        kinds = mixture(groups, kinds=("low", "mixed", "high"))
        prompts = [Prompt(uid, (uid,), str(uid), "source", kind, {"uid": uid}, str(uid)) for uid, kind in enumerate(kinds)]
        self.stream = PromptStream(cast(Any, prompts), DataOrder(len(prompts), groups, seed=0, shuffle=True))
        self.buffer = Buffer(case.sampler.n, self.stream.prompt)
        self.sampler, self.judge, self.steps, self.step = case.sampler, judge, steps, 0
        self.policy = RolloutsAhead(
            self.buffer, groups=groups, oversubmit=oversubmit, max_staleness=max_staleness, schedule=schedule
        )
        self.engine = engine(slots)

    def next_batch(self, train: Callable[[], object] = lambda: None) -> Batch:
        """As in the loop: the batch of the next step; the one after it is generated while ``train`` runs."""
        self.step += 1
        self.sampler.rollout, self.sampler.policy = cast(Any, self.engine), self.policy
        self.sampler.rewards = cast(Any, self.judge(KINDS))
        batch = self.sampler.next_batch(self.step, self.stream, Phases())
        if self.step != self.steps:
            with self.policy.generating(self.sampler, self.step + 1, self.stream, Phases(), {}):
                train()
        else:
            self.policy.release()
        if self.policy.schedule.syncs(self.step):
            self.engine.version = self.step
        return batch

    @property
    def state(self) -> Any:
        return self.step, self.stream.state(), self.buffer.arrays()

    def resume(self, state: Any) -> None:
        self.step, position, arrays = state
        self.stream.load(position)
        self.buffer.load_arrays(arrays)
        self.engine.version = self.step


def staleness(batch: Batch) -> int:
    return int(batch.meta["metrics"]["rollout/staleness/max"])


class Killed(Exception):
    """Stand-in for the death of the process: what it had is lost."""


class Mortal(Engine):
    """Dies in tick ``dies_in`` from now on; None: it does not."""

    dies_in: int | None = None

    def flow(self, *args: Any, **options: Any) -> Flow:
        found = super().flow(*args, **options)
        wait = found.wait

        def wait_or_die() -> list[Batch]:
            if self.dies_in is not None:
                self.dies_in -= 1
                if self.dies_in < 0:
                    raise Killed
            return wait()

        found.wait = wait_or_die  # type: ignore[method-assign]
        return found


@pytest.mark.parametrize("seed", range(200))
def test_every_ordinal_is_trained_once_and_never_staler_than_the_bound(seed: int, case: Case) -> None:
    """With kills inside and between steps, slow training and slow scores, and weights that change during responses."""
    numbers = random.Random(seed)
    options: dict[str, Any] = {
        "groups": numbers.randint(1, 6), "max_staleness": numbers.randint(1, 4), "oversubmit": numbers.choice([1.0, 1.5, 3.0]),
        "slots": numbers.choice([6, 16, 60]), "judge": numbers.choice([Judge, Slow]), "engine": Mortal,
    }  # fmt: skip
    groups, bound, save_freq = options["groups"], options["max_staleness"], numbers.randint(1, 2)
    pause = numbers.choice(["abort", "keep", "finish"])
    schedule = replace(EVERY_STEP, every=numbers.randint(1, bound), save_every=save_freq, pause=pause)
    options["schedule"] = schedule
    undisturbed = Run(case, **options | {"judge": Judge})
    batches = [undisturbed.next_batch() for _ in range(6)]
    run, saved = Run(case, **options), (None, [])
    trained: list[int] = []
    kills = ["while training", "while generating", "between steps", "while training"][: numbers.randint(1, 4)]

    def train() -> None:
        time.sleep(numbers.choice([0.0, 0.0005]))
        if killed == "while training":
            raise Killed

    while run.step < 6:
        killed = kills.pop() if kills and numbers.random() < 0.5 else None
        cast(Mortal, run.engine).dies_in = numbers.randint(0, 3) if killed == "while generating" else None
        try:
            batch = run.next_batch(train)
            trained += groups_of(batch)
            assert len(trained) == len(set(trained)) == groups * run.step
            in_flight = run.buffer.arrays()["ordinal"].tolist()
            assert sorted(trained + in_flight) == run.buffer.admitted == [*range(len(run.buffer.admitted))]
            assert len(run.buffer.admitted) <= groups * (run.step + bound + 1), (
                "admitted and not trained: a batch for each version"
            )
            assert len(run.buffer.complete()) >= groups, "the next batch is there"
            versions = batch.tokens["weight_version"][batch.tokens["response_mask"].bool()]
            assert staleness(batch) == run.step - 1 - int(versions.min()) <= bound
            assert {*versions.tolist()} <= {0, *(step for step in range(1, run.step) if schedule.syncs(step))}
            of_rows = zip(batch.split_rows("weight_version"), batch.split_rows("response_mask"), strict=True)
            assert pause != "finish" or all(len(row[mask.bool()].unique()) == 1 for row, mask in of_rows)
            assert pause != "finish" or not schedule.syncs(run.step) or run.buffer.n_unfinished == 0
            shares = [batch.meta["metrics"].get(f"rollout/staleness/{k}", 0.0) for k in range(bound + 1)]
            assert shares == [float((versions == run.step - 1 - k).double().mean()) for k in range(bound + 1)]
            assert same(batch, batches[run.step - 1])
            if schedule.needs_empty_engines(run.step):
                assert not run.policy.keeps_requests
                saved = run.state, [*trained]
            if killed == "between steps":
                raise Killed
        except Killed:
            run, (state, trained) = Run(case, **options), (saved[0], [*saved[1]])
            if state is not None:
                run.resume(state)
                run.buffer.admitted = sorted(trained + run.buffer.arrays()["ordinal"].tolist())


def test_staleness_is_one_from_the_second_step_on_and_reaches_its_bound(case: Case) -> None:
    one, two = Run(case, max_staleness=1), Run(case, max_staleness=3, oversubmit=3.0)
    found = [staleness(one.next_batch()) for _ in range(6)]
    assert found == [0, 1, 1, 1, 1, 1] and len(one.buffer) == 3, "one batch is in flight"
    assert max(staleness(two.next_batch()) for _ in range(10)) == 3


@pytest.mark.parametrize("bound", [1, 3])
def test_run_that_is_resumed_after_any_step_has_the_same_batches(bound: int, case: Case) -> None:
    options: dict[str, Any] = {"max_staleness": bound, "oversubmit": 2.0, "slots": 60}
    whole, states, batches = Run(case, **options), [], []
    for _ in range(6):
        batches.append(whole.next_batch())
        states.append(whole.state)
    for step in range(1, 6):
        again = Run(case, **options, judge=Slow)
        again.resume(states[step - 1])
        assert all(same(again.next_batch(lambda: time.sleep(0.001)), batch) for batch in batches[step:])


def test_schedule_depends_on_steps_alone() -> None:
    schedule = SyncSchedule(every=3, save_every=5, test_every=4, pause="keep", keeps_cache=False)
    assert [step for step in range(1, 13) if schedule.syncs(step)] == [3, 4, 5, 6, 8, 9, 10, 12]
    ends = {step: schedule.at_end(step) for step in range(1, 7)}
    assert ends == {1: "keep", 2: "keep", 3: "keep", 4: "abort", 5: "abort", 6: "keep"}
    assert replace(schedule, pause="abort").at_end(2) == "keep", "the engines continue with their weights"
    assert {replace(schedule, pause="finish").at_end(step) for step in (3, 4, 5)} == {"finish"}


@pytest.mark.parametrize("pause", ["abort", "keep", "finish"])
@pytest.mark.parametrize("every", [1, 2])
def test_run_that_is_resumed_between_two_syncs_has_the_same_batches(every: int, pause: Any, case: Case) -> None:
    schedule = replace(EVERY_STEP, every=every, save_every=3, pause=pause)
    options: dict[str, Any] = {"max_staleness": 4, "oversubmit": 3.0, "slots": 6, "schedule": schedule}
    whole, states, batches = Run(case, **options), {}, []
    for step in range(1, 11):
        batches.append(whole.next_batch())
        if schedule.needs_empty_engines(step):
            states[step] = whole.state
    assert [*states] == [3, 6, 9]
    for step, state in states.items():
        again = Run(case, **options, judge=Slow)
        again.resume(state)
        assert all(same(again.next_batch(lambda: time.sleep(0.001)), batch) for batch in batches[step:])


def test_kept_requests_are_computed_once_and_long_responses_have_several_versions(case: Case) -> None:
    """Between two checkpoints the engines keep their requests, so one flow serves all steps."""
    flows: list[Flow] = []

    class Counting(Engine):
        def flow(self, *args: Any, **options: Any) -> Flow:
            flows.append(super().flow(*args, **options))
            return flows[-1]

    options: dict[str, Any] = {"max_staleness": 4, "oversubmit": 3.0, "slots": 4, "engine": Counting}
    kept = Run(case, schedule=replace(EVERY_STEP, pause="keep", save_every=6), **options)
    batches = [kept.next_batch() for _ in range(5)]
    assert len(flows) == 1 and kept.policy.keeps_requests
    versions = [row.unique() for batch in batches for row in batch.split_rows("weight_version")]
    assert max(map(len, versions)) >= 3
    kept.next_batch()
    assert len(flows) == 1 and not kept.policy.keeps_requests, "the checkpoint of step 6 holds all of them"
    kept.next_batch()
    assert len(flows) == 2


def test_nothing_is_generated_beyond_the_last_step(case: Case) -> None:
    run = Run(case, max_staleness=1, steps=3)
    for _ in range(3):
        run.next_batch()
    assert len(run.buffer) == 0 and len(run.buffer.admitted) == 9


def test_engines_work_while_the_trainer_does(case: Case) -> None:
    """The update waits for a tick of the next generation, and that generation for the update to have begun."""
    ticked = threading.Event()

    class Ticking(Engine):
        def flow(self, *args: Any, **options: Any) -> Flow:
            found = super().flow(*args, **options)
            wait = found.wait

            def counted() -> list[Batch]:
                ticked.set()
                return wait()

            found.wait = counted  # type: ignore[method-assign]
            return found

    run = Run(case, engine=Ticking)

    def train() -> None:
        assert ticked.wait(10.0), "no tick while training"

    ticked.clear()
    run.next_batch(train)


class Failing(Engine):
    """Fails in the first tick during an update, like a replica that died."""

    def flow(self, *args: Any, **options: Any) -> Flow:
        found = super().flow(*args, **options)
        start = found.start

        def fail_in_the_thread() -> bool:
            if threading.current_thread().name == "generation ahead":
                raise RuntimeError("replica 0 died")
            return start()

        found.start = fail_in_the_thread  # type: ignore[method-assign]
        return found


def test_error_of_the_generation_ends_the_step_after_its_training(case: Case) -> None:
    trained: list[bool] = []
    with pytest.raises(RuntimeError, match="replica 0 died"):
        Run(case, engine=Failing).next_batch(lambda: trained.append(True))
    assert trained == [True]


class Endless(Engine):
    """Responses are not shorter than 10^6 tokens."""

    def response(self, seed: int) -> list[int]:
        return [2] * 10**6


def test_error_of_the_training_ends_the_generation_at_its_next_tick(case: Case) -> None:
    run = Run(case)
    run.next_batch()
    run.engine = Endless(12)

    def fail() -> None:
        raise ValueError("the update failed")

    start = time.monotonic()
    run.buffer.remove([group.ordinal for group in run.buffer.complete()])
    run.step += 1
    run.sampler.rollout = cast(Any, run.engine)
    with (
        pytest.raises(ValueError, match="the update failed"),
        run.policy.generating(run.sampler, run.step + 1, run.stream, Phases(), {}),
    ):
        fail()
    assert time.monotonic() - start < 10.0
    assert not [thread for thread in threading.enumerate() if thread.name == "generation ahead"]
