"""Partial rollouts, most with dynamic sampling, on a simulated engine: batches, ages, counts, resumed runs, hopeless data."""

import random
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch

from configs.schema.ppo import FilterGroupsConfig
from tests.trainer.rollout.test_sampler import KINDS, STOP, Case, Judge, make
from trainer.data.dataset import Prompt, PromptStream
from trainer.data.order import DataOrder
from trainer.rewards.scoring import Score
from trainer.rollout.buffer import GroupBuffer, PendingGroup
from trainer.rollout.partial import FilteredPartialRollouts, PartialRollouts
from trainer.run.timing import Phases
from workers.batch import Batch
from workers.rollout.base import Sampling
from workers.seeding import seed_of

TICK = 4  # tokens of a response in a tick


@dataclass
class Engine:
    """Generates ``slots`` requests at the same time. The seed of a request determines its response."""

    slots: int
    longest: int = 24
    version: int = 0
    in_step: bool = True

    def flow(
        self,
        sampling: Sampling,
        requests: Callable[[Sequence[int]], Batch],
        *,
        expected: int,
        in_step: bool = True,
        replaces: bool = True,
    ) -> "Flow":
        assert in_step is self.in_step
        return Flow(self, requests)

    def response(self, seed: int) -> list[int]:
        length = min(1 + int(random.Random(seed).expovariate(5 / self.longest)), self.longest)
        return [seed_of("token", seed, place) % 1000 + 2 for place in range(length - 1)] + [STOP]


@dataclass
class Flow:
    engine: Engine
    requests: Callable[[Sequence[int]], Batch]
    new: list[int] = field(default_factory=list)
    left: dict[int, list[int]] = field(default_factory=dict)
    """Tokens that a request has yet to generate, and those of this flow so far."""
    sampled: dict[int, list[int]] = field(default_factory=dict)
    versions: dict[int, list[int]] = field(default_factory=dict)

    def admit(self, ids: Sequence[int], prompt_tokens: int) -> None:
        self.new += ids

    has_lost = False

    @property
    def unfinished(self) -> int:
        return len(self.new) + len(self.left)

    def start(self) -> bool:
        rows, new = self.requests(self.new).rows if self.new else {}, self.new
        for id, seed, begun in zip(new, *(rows[name].tolist() for name in ("seed", "begun") if new), strict=False):
            self.left[id], self.sampled[id], self.versions[id] = self.engine.response(seed)[begun:], [], []
        self.new = []
        return bool(self.left)

    def wait(self) -> list[Batch]:
        running = list(self.left)[: self.engine.slots]
        for id in running:
            self.sampled[id] += self.left[id][:TICK]
            self.versions[id] += [self.engine.version] * len(self.left[id][:TICK])
            self.left[id] = self.left[id][TICK:]
        ended = [id for id in running if not self.left[id]]
        return [self.pop(ended)] if ended else []

    def settle(self) -> list[Batch]:
        return []

    def suspend(self) -> tuple[list[Batch], list[Batch]]:
        return [], [self.pop(list(self.left))]

    def pop(self, ids: Sequence[int]) -> Batch:
        rows = [self.sampled.pop(id) for id in ids]
        for id in ids:
            del self.left[id]
        tokens = torch.tensor([token for row in rows for token in row], dtype=torch.int64)
        versions = [version for id in ids for version in self.versions.pop(id)]
        return Batch(
            torch.tensor([len(row) for row in rows], dtype=torch.int64),
            {
                "input_ids": tokens,
                "rollout_log_probs": torch.zeros(len(tokens)),
                "weight_version": torch.tensor(versions, dtype=torch.int32),
            },
            {"id": torch.tensor(ids, dtype=torch.int64), "finished": torch.ones(len(ids), dtype=torch.int64)},
        )


class Slow(Judge):
    """Scores are late."""

    def finish(self, keys: Sequence[int]) -> list[Score]:
        time.sleep(0.001)
        return super().finish(keys)


class Buffer(GroupBuffer):
    """Records the groups that enter and leave."""

    def __init__(self, n: int, prompt: Callable[[int], Prompt]) -> None:
        super().__init__(n, prompt)
        self.admitted: list[int] = []
        self.removed: list[PendingGroup] = []

    def admit(self, step: int, prompt: Prompt, seeds: Sequence[int], greedy: Sequence[bool]) -> list[int]:
        assert prompt.uid not in self.uids, "in flight"
        self.admitted.append(prompt.ordinal)
        return super().admit(step, prompt, seeds, greedy)

    def remove(self, ordinals: Iterable[int]) -> list[PendingGroup]:
        removed = super().remove(ordinals)
        self.removed += removed
        return removed


@pytest.fixture(scope="module")
def case() -> Case:
    """Composed once."""
    return make(["mixed"], groups=1, per_round=1)


@dataclass
class Run:
    """A run over prompts of these kinds, see test_sampler.py. per_round: default ``groups``."""

    case: Case
    kinds: Sequence[str]
    groups: int = 3
    oversubmit: float = 1.5
    max_age: int = 2
    slots: int = 12
    cap: int = 0
    per_round: int | None = None
    judge: type[Judge] = Judge
    with_baselines: bool = False
    filtered: bool = True
    step: int = 0

    def __post_init__(self) -> None:
        prompts = [Prompt(uid, (uid,), str(uid), "source", kind, {"uid": uid}, str(uid)) for uid, kind in enumerate(self.kinds)]
        order = DataOrder(len(prompts), self.per_round or self.groups, seed=0, shuffle=True)
        self.stream = PromptStream(cast(Any, prompts), order)
        self.buffer = Buffer(self.case.sampler.n + self.with_baselines, self.stream.prompt)

    def next_batch(self) -> Batch:
        self.step += 1
        filters = FilterGroupsConfig(enable=True, metric=None, max_num_gen_batches=self.cap)
        sampler = self.case.sampler
        sampler.rollout = cast(Any, Engine(self.slots, version=self.step - 1))
        sampler.rewards = cast(Any, self.judge(KINDS))
        sampler.with_baselines = self.with_baselines
        options: dict[str, Any] = {"groups": self.groups, "oversubmit": self.oversubmit, "max_age": self.max_age}
        filtered, plain = FilteredPartialRollouts(self.buffer, filters, **options), PartialRollouts(self.buffer, **options)
        sampler.policy = filtered if self.filtered else plain
        return sampler.next_batch(self.step, self.stream, Phases())

    def resume(self, state: tuple[int, dict[str, int], dict[str, torch.Tensor]]) -> None:
        self.step, position, arrays = state
        self.stream.load(position)
        self.buffer.load_arrays(arrays)

    @property
    def state(self) -> tuple[int, dict[str, int], dict[str, torch.Tensor]]:
        return self.step, self.stream.state(), self.buffer.arrays()

    @property
    def drawn(self) -> int:
        return self.stream.drawn * self.stream.order.batch_size + self.stream.taken


def groups_of(batch: Batch) -> list[int]:
    return list(dict.fromkeys(batch.rows["group"].tolist()))


def same(batch: Batch, other: Batch) -> bool:
    columns = [(batch.lengths, other.lengths), *((batch.tokens[name], other.tokens[name]) for name in other.tokens)]
    columns += [(batch.rows[name], other.rows[name]) for name in other.rows]
    return all(torch.equal(*pair) for pair in columns) and (batch.objects, batch.meta) == (other.objects, other.meta)


def metric(batch: Batch, name: str) -> float:
    return batch.meta["metrics"][f"training/filter_groups/{name}"]


def dropped(batch: Batch) -> float:
    return sum(metric(batch, f"dropped_{verdict}") for verdict in ("low", "high", "failed"))


def mixture(seed: int, n: int = 400, kinds: Sequence[str] = ("low", "mixed", "mixed", "high", "gap", "lost")) -> list[str]:
    return random.Random(seed).choices(kinds, k=n)


def test_batch_is_the_first_kept_groups_by_tick_and_ordinal(case: Case) -> None:
    """No group is so old that it comes first. A group may be trained in a step after that in which it ended."""
    kinds = mixture(0)
    run, waited = Run(case, kinds, groups=4, max_age=6), 0
    kept: list[tuple[int, int]] = []
    for _ in range(8):
        removed = len(run.buffer.removed)
        waiting = {group.ordinal for group in run.buffer.complete()}
        batch = run.next_batch()
        ended = [*run.buffer.removed[removed:], *run.buffer.complete()]
        kept += [
            (cast(int, group.tick), group.ordinal)
            for group in ended
            if group.ordinal not in waiting and group.prompt.ground_truth in ("mixed", "gap")
        ]
        kept.sort()
        assert groups_of(batch) == [ordinal for _, ordinal in kept[:4]]
        waited += len(waiting & set(groups_of(batch)))
        kept = kept[4:]
    assert waited > 4 and run.buffer.n_unfinished > 0


@pytest.mark.parametrize("seed", range(200))
def test_every_ordinal_is_trained_once_dropped_or_in_flight_under_any_schedule(seed: int, case: Case) -> None:
    """With kills in between. Small data: epochs end in a step, and prompts in flight are not drawn again."""
    numbers = random.Random(seed)
    groups = numbers.randint(1, 5)
    run = Run(
        case,
        numbers.choice([mixture(seed), [*mixture(seed, 6), *["mixed"] * 10]]),
        groups=groups,
        oversubmit=numbers.choice([1.0, 1.5, 3.0]),
        max_age=numbers.randint(1, 3),
        slots=numbers.choice([6, 16, 60]),
        judge=numbers.choice([Judge, Slow]),
        with_baselines=numbers.random() < 0.3,
    )
    trained: list[int] = []
    rejected = 0.0
    for _ in range(4):
        batch = run.next_batch()
        trained += groups_of(batch)
        rejected += dropped(batch)
        assert len(trained) == len(set(trained)) == groups * run.step
        assert len(trained) + rejected + len(run.buffer) == len(run.buffer.admitted)
        in_flight = run.buffer.arrays()["ordinal"].tolist()
        left = {group.ordinal for group in run.buffer.removed}
        assert left >= set(trained) and len(left) == len(run.buffer.removed)
        assert sorted([*left, *in_flight]) == run.buffer.admitted, "nothing else left the buffer"
        skipped = run.drawn - len(run.buffer.admitted)
        assert skipped == 0 if len(run.kinds) == 400 else len(run.buffer) <= 16
        assert metric(batch, "groups") - dropped(batch) - metric(batch, "surplus") == groups
        assert batch.meta["metrics"]["rollout/age/max"] <= run.max_age
        assert (run.step - run.buffer.arrays()["step"]).tolist() == [] or max(
            (run.step - run.buffer.arrays()["step"]).tolist()
        ) < run.max_age
        if numbers.random() < 0.3:
            run.resume(run.state)


def test_groups_that_waited_for_a_step_are_learned_from_once(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are scored again in the step that trains them: a checkpoint has no scores."""
    scored, learned, finish = Counter[int](), Counter[int](), case.sampler.finish_scoring

    def counting(batch: Batch, asked: Sequence[Prompt], *args: Any, known: Container[int], **options: Any) -> Batch:
        ordinals = {prompt.ordinal for prompt in asked}
        scored.update(ordinals)
        learned.update(ordinal for ordinal in ordinals if ordinal not in known)
        return finish(batch, asked, *args, known=known, **options)

    monkeypatch.setattr(case.sampler, "finish_scoring", counting)
    run = Run(case, mixture(0), groups=4, max_age=6)
    for _ in range(8):
        run.next_batch()
        resumed = Run(case, run.kinds, groups=4, max_age=6)
        resumed.resume(run.state)
        run = resumed
    assert max(scored.values()) > 1 and set(learned.values()) == {1} and learned.keys() == scored.keys()


@pytest.mark.parametrize("seed", range(100))
def test_without_a_filter_every_ordinal_is_trained_once_before_it_is_too_old(seed: int, case: Case) -> None:
    numbers = random.Random(seed)
    groups, max_age = numbers.randint(1, 8), numbers.randint(1, 3)
    options: dict[str, Any] = {"oversubmit": numbers.choice([1.0, 1.5, 3.0]), "slots": numbers.choice([6, 16, 60])}
    kinds = mixture(seed, kinds=("low", "mixed", "high"))
    run = Run(case, kinds, groups=groups, max_age=max_age, judge=numbers.choice([Judge, Slow]), filtered=False, **options)
    trained: list[int] = []
    for _ in range(6):
        batch = run.next_batch()
        trained += groups_of(batch)
        assert len(trained) == len(set(trained)) == groups * run.step
        assert sorted(trained + run.buffer.arrays()["ordinal"].tolist()) == run.buffer.admitted == [*range(run.drawn)]
        assert batch.meta["metrics"]["rollout/age/max"] <= max_age
        if numbers.random() < 0.3:
            run.resume(run.state)


@pytest.mark.parametrize("filtered", [False, True])
def test_prompts_that_waited_for_a_slot_are_not_computed_again(filtered: bool, case: Case) -> None:
    """Prompts have one token."""
    run = Run(case, mixture(5), oversubmit=4.0, slots=7, filtered=filtered)
    waited = 0
    for _ in range(5):
        begun = [run.buffer.requests(ids).rows["begun"] for ids in run.buffer.unfinished()]
        waited += sum(not group.any() for group in begun)
        batch = run.next_batch()
        assert batch.meta["metrics"]["rollout/recomputed_tokens"] == sum(1 + int(group.sum()) for group in begun if group.any())
    assert waited > 0


@pytest.mark.parametrize("with_baselines", [False, True])
def test_run_that_is_resumed_after_any_step_has_the_same_batches(with_baselines: bool, case: Case) -> None:
    """Kept groups wait at the end of several steps. Late scores change nothing."""
    options: dict[str, Any] = {"oversubmit": 2.0, "max_age": 1, "slots": 60, "with_baselines": with_baselines}
    whole, states = Run(case, mixture(3), **options), []
    batches, waiting = [], 0.0
    for _ in range(6):
        states.append(whole.state)
        batches.append(whole.next_batch())
        waiting += metric(batches[-1], "surplus")
    assert waiting > 2 and sum(batch.meta["metrics"]["rollout/age/max"] for batch in batches) > 2
    for first in range(6):
        again = Run(case, mixture(3), **options, judge=Slow)
        again.resume(states[first])
        assert all(same(again.next_batch(), batch) for batch in batches[first:])


def test_groups_whose_rewards_failed_are_dropped_and_others_lack_only_these_rows(case: Case) -> None:
    run = Run(case, ["gap", "lost", "failed", "mixed", "mixed", "gap"], groups=2, per_round=6)
    batch = run.next_batch()
    assert {run.kinds[uid] for uid in batch.rows["uid"].tolist()} <= {"gap", "mixed"}
    for _ in range(3):
        batch = run.next_batch()
        for group in groups_of(batch):
            uids = batch.rows["uid"][batch.rows["group"] == group].tolist()
            assert len(uids) == {"gap": 3, "mixed": 4}[run.kinds[uids[0]]]
        assert batch.meta["metrics"]["reward/failed"] >= metric(batch, "dropped_failed") * 3
        assert "rollout/wasted_tokens" not in batch.meta["metrics"]


def test_failed_rewards_end_the_run_after_a_round_without_any_score(case: Case) -> None:
    with pytest.raises(ValueError, match=r"rewards of the step failed; the first: KeyError"):
        Run(case, ["failed"] * 9).next_batch()
    run = Run(case, [*["failed"] * 32, *["mixed"] * 8], groups=2, per_round=40, slots=4)
    assert len(groups_of(run.next_batch())) == 2, "less than a round"
    first, *_ = sorted(run.buffer.removed, key=lambda group: cast(int, group.tick))
    assert first.prompt.ground_truth == "failed", "it has no score, and was judged before all others"


def test_hopeless_data_ends_the_run_with_the_counts(case: Case) -> None:
    with pytest.raises(
        ValueError, match=r"kept 0 of the 3 .* in [0-9.]+ rounds, and [2-9][0-9.]* rounds, a whole pass .*kept none"
    ):
        Run(case, ["low", "high"] * 3).next_batch()
    run = Run(case, ["mixed", "mixed", *["low"] * 400], groups=3, cap=4)
    with pytest.raises(ValueError, match=r"in [45][0-9.]* rounds, and algorithm.filter_groups.max_num_gen_batches=4 is reached"):
        for _ in range(9):
            run.next_batch()


def test_dropped_prompt_is_drawn_again_with_other_seeds(case: Case) -> None:
    run = Run(case, ["mixed", "mixed", "low>mixed"], groups=3, per_round=3)
    batch = run.next_batch()
    assert sorted(set(batch.rows["uid"].tolist())) == [0, 1, 2] and metric(batch, "dropped_low") == 1
    (low,) = [group for group in run.buffer.removed if group.prompt.uid == 2 and group.ordinal not in groups_of(batch)]
    (kept,) = [group for group in run.buffer.removed if group.prompt.uid == 2 and group is not low]
    assert not {one.seed for one in low.responses} & {one.seed for one in kept.responses}
