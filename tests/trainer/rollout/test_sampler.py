"""A step's batch from a simulated engine and simulated rewards: sampled prompts, kept groups, rewards."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from configs.compose import compose
from configs.schema.ppo import FilterGroupsConfig, PPOConfig
from data_preprocess.tiny_model import character_tokenizer
from tests.trainer.algorithms.parts import in_parts
from tests.trainer.watchdogs import watchdog
from trainer.agents.sessions.session_flow import AgentSessions
from trainer.algorithms.segments import sum_by
from trainer.algorithms.trajectories import Trajectories
from trainer.data.dataset import Prompt, PromptStream
from trainer.data.order import DataOrder
from trainer.resilience.rollback import Rollbacks
from trainer.rewards.pool.runner import Response, Score
from trainer.rewards.remote.remote_rewards import RemoteRewards
from trainer.rewards.scoring import Failures
from trainer.rewards.shaping import RunningMoments, Shaping
from trainer.rollout.policies import FilteredRounds, OneRound
from trainer.rollout.responses import join_responses
from trainer.rollout.sampler import Sampler, token_rewards
from trainer.run.timing import Phases
from workers.batch import Batch
from workers.roles.rollout_role import decode_responses
from workers.rollout.base import Sampling
from workers.seeding import seed_of

N = 4
STOP = 0
LATE = "timed out after 30 s"
WATCHDOG = watchdog(Path())  # nothing is late here
SAMPLING = Sampling(temperature=1.0, top_k=-1, top_p=1.0, max_tokens=8, stop_token_ids=(STOP,))


@dataclass
class Engine:
    """Writes ``length`` tokens and the stop token: 1s if greedy, else a token of the seed. Records its inputs.

    cut: responses that are truncated, by their place in a call. part: responses that end at the same time, the last first.
    """

    length: int = 2
    cut: tuple[int, ...] = ()
    part: int = 1000
    balance: str = "static"
    asked: list[Batch] = field(default_factory=list)

    def stream(self, questions: Batch, sampling: Sampling, group_size: int) -> Iterator[Batch]:
        assert len(questions) % group_size == 0
        self.asked.append(questions)
        first = torch.where(questions.rows["greedy"], 1, questions.rows["seed"] % 1000 + 2)
        n = len(questions)
        finished = torch.ones(n, dtype=torch.int64)
        finished[list(self.cut)] = 0
        ids = torch.cat([first[:, None].expand(n, self.length), torch.full((n, 1), STOP)], dim=1)
        ids = ids[torch.stack([torch.ones(n), torch.ones(n), finished], dim=1).bool()] if self.cut else ids.flatten()
        whole = Batch(
            lengths=self.length + finished,
            tokens={
                "input_ids": ids,
                "rollout_log_probs": torch.zeros(len(ids)),
                "weight_version": torch.full((len(ids),), 3).int(),
            },
            rows={"id": torch.arange(n), "finished": finished},
        )
        yield from (whole.select(range(max(0, end - self.part), end)) for end in range(n, 0, -self.part))

    def flow(self, sampling: Sampling, requests: Callable[[Sequence[int]], Batch], *, expected: int) -> "Flow":
        return Flow(self, sampling, requests)

    @property
    def uids(self) -> list[list[int]]:
        """The sampled prompts, call by call: the only token of a prompt is its uid."""
        return [list(dict.fromkeys(call.tokens["input_ids"].tolist())) for call in self.asked]


class Flow:
    """Generates the requests of each start one after the other; each wait returns one part."""

    waiting = False

    def __init__(self, engine: Engine, sampling: Sampling, requests: Callable[[Sequence[int]], Batch]) -> None:
        self.engine, self.sampling, self.requests = engine, sampling, requests
        self.ids: list[int] = []
        self.parts: list[Batch] = []

    def admit(self, ids: Sequence[int], prompt_tokens: int) -> None:
        self.ids += ids

    def start(self) -> bool:
        ids, self.ids = torch.tensor(self.ids), []
        for part in self.engine.stream(self.requests(ids.tolist()), self.sampling, 1) if len(ids) else ():
            self.parts.append(part.with_rows(id=ids[part.rows["id"]]))
        return bool(self.parts)

    def wait(self) -> list[Batch]:
        return [self.parts.pop(0)]

    def discard(self) -> list[Batch]:
        return self.parts


class Decoder:
    def batch_decode(self, written: Sequence[list[int]], skip_special_tokens: bool) -> list[str]:
        return [" ".join(map(str, ids)) for ids in written]


@dataclass
class Judge:
    """Scores of a prompt's samples by its ground truth: {kind: a score or a failure (None) for each sample, the greedy last}."""

    kinds: dict[str, list[float | None]]
    calls: Counter[int] = field(default_factory=Counter)
    submitted: dict[int, Response] = field(default_factory=dict)

    def submit(self, answers: Sequence[Response], keys: Sequence[int]) -> None:
        assert self.submitted.keys().isdisjoint(keys)
        self.submitted |= zip(keys, answers, strict=True)

    def finish(self, keys: Sequence[int]) -> list[Score]:
        answers = [self.submitted.pop(key) for key in keys]
        uids = [answer.extra_info["uid"] for answer in answers]
        self.calls.update(set(uids))
        scores = []
        for i, answer in enumerate(answers):
            value = self.kinds[self.kind(answer)][i - uids.index(uids[i])]
            extra = {"twice": 2 * value} if value is not None else {}
            late = self.kind(answer) == "late" and value is None
            error = LATE if late else "KeyError: 'x' (reward.py:3)"
            scores.append(Score(value, extra, error if value is None else None, timed_out=late))
        return scores

    def kind(self, answer: Response) -> str:
        """ "a>b": a when the prompt is first sampled, b later."""
        first, _, later = answer.ground_truth.partition(">")
        return later if later and self.calls[answer.extra_info["uid"]] > 1 else first


class RecordedEvents(list):
    """Events as tuples."""

    def add(self, step: int, kind: str, text: str) -> None:
        self.append((step, kind, text))


KINDS: dict[str, list[float | None]] = {
    "low": [0.0] * N + [0.0],
    "high": [1.0] * N + [1.0],
    "mixed": [0.0, 1.0, 0.0, 1.0, 0.5],
    "gap": [0.0, None, 0.0, 1.0, 0.5],  # a reward failed
    "lost": [None, 1.0, None, None, 0.5],
    "failed": [None] * N + [None],
    "late": [1.0, None, 1.0, None, 1.0],
    "no baseline": [0.0, 1.0, 0.0, 1.0, None],
}


@dataclass
class Case:
    sampler: Sampler
    engine: Engine
    stream: PromptStream
    events: RecordedEvents

    def next_batch(self, step: int = 1) -> Batch:
        return self.sampler.next_batch(step, self.stream, Phases())

    def uids(self, step: int = 1) -> list[int]:
        return list(dict.fromkeys(self.next_batch(step).rows["uid"].tolist()))


def make(
    kinds: Sequence[str],
    *overrides: str,
    groups: int,
    per_round: int,
    n: int = N,
    cap: int | None = 0,
    metric: str | None = None,
    with_baselines: bool = False,
) -> Case:
    """kinds: kind of each prompt, in the data's order. cap None: no filter. overrides: of reward.*"""
    config = compose("ppo_trainer", PPOConfig, [f"reward.{override}" for override in overrides])
    engine, events = Engine(), RecordedEvents()
    prompts = [Prompt(uid, (uid,), str(uid), f"source {uid % 2}", kind, {"uid": uid}, str(uid)) for uid, kind in enumerate(kinds)]
    filters = FilterGroupsConfig(enable=True, metric=metric, max_num_gen_batches=cap or 0)
    sampler = Sampler(
        cast(Any, engine),
        cast(Any, Judge(KINDS)),
        cast(Any, Decoder()),
        WATCHDOG,
        n=n,
        sampling=SAMPLING,
        seed=7,
        policy=OneRound() if cap is None else FilteredRounds(filters, groups),
        with_baselines=with_baselines,
        reward=config.reward,
        shaping=Shaping(config.reward.shaping, RunningMoments()),
        models=None,
        rollbacks=Rollbacks(),
        failures=Failures(cast(Any, events)),
    )
    return Case(
        sampler, engine, PromptStream(cast(Any, prompts), DataOrder(len(prompts), per_round, seed=0, shuffle=False)), events
    )


def counts(batch: Batch) -> dict[str, float]:
    return {name.removeprefix("training/filter_groups/"): value for name, value in batch.meta["metrics"].items()}


def test_step_without_a_filter_is_one_round() -> None:
    case = make(["low", "mixed", "high", "gap"], groups=2, per_round=2, cap=None)
    first, second = case.next_batch(1), case.next_batch(2)
    assert first.rows["uid"].tolist() == [0] * 4 + [1] * 4 and first.rows["sample"].tolist() == [0, 1, 2, 3] * 2
    assert second.rows["uid"].tolist() == [2] * 4 + [3] * 3 and second.rows["sample"].tolist() == [0, 1, 2, 3, 0, 2, 3]
    assert first.meta["metrics"] == {"reward/failed": 0, "reward/failed_share": 0.0, "reward/timed_out_share": 0.0}
    assert second.meta["metrics"] == {"reward/failed": 1, "reward/failed_share": 1 / 8, "reward/timed_out_share": 0.0}
    assert first.meta["generated_tokens"] == 8 * 3 and case.stream.drawn == 2
    assert torch.equal(first.rows["group"], first.rows["uid"]) and torch.equal(second.rows["group"], second.rows["uid"])
    seeds = [seed for call in case.engine.asked for seed in call.rows["seed"].tolist()]
    assert len(set(seeds)) == 16, "every response has its own seed"


@pytest.mark.parametrize("part", [1, 3])
@pytest.mark.parametrize("with_baselines", [False, True])
def test_batch_is_the_same_whenever_responses_end(part: int, with_baselines: bool) -> None:
    batches = []
    for size in (1000, part):
        case = make(["low", "mixed", "high", "gap"], groups=4, per_round=4, cap=None, with_baselines=with_baselines)
        case.engine.part, case.engine.cut = size, (1, 6)
        batches.append(case.next_batch())
    whole, pieces = batches
    assert whole.tokens.keys() == pieces.tokens.keys() and whole.rows.keys() == pieces.rows.keys() and "id" not in whole.rows
    assert all(torch.equal(whole.tokens[name], pieces.tokens[name]) for name in whole.tokens)
    assert all(torch.equal(whole.rows[name], pieces.rows[name]) for name in whole.rows)
    assert (whole.objects, whole.meta) == (pieces.objects, pieces.meta)


def test_batch_is_the_first_kept_groups_of_all_rounds_in_prompt_order() -> None:
    kinds = ["low", "mixed", "high", "mixed", "mixed", "low", "mixed", "mixed", "mixed", "mixed"]
    case = make(kinds, groups=4, per_round=2)
    batch = case.next_batch()
    assert batch.rows["uid"].tolist() == [uid for uid in (1, 3, 4, 6) for _ in range(N)]
    assert batch.rows["sample"].tolist() == [0, 1, 2, 3] * 4
    assert case.engine.uids == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert counts(batch) == {
        "rollout/wasted_tokens": 0.0,
        "reward/failed": 0, "reward/failed_share": 0.0, "reward/timed_out_share": 0.0, "rounds": 4.0, "groups": 8.0,
        "surplus": 1.0, "dropped_low": 2.0, "dropped_high": 1.0,
        "dropped_failed": 0.0, "metric_mean": pytest.approx((0 + 0.5 + 1 + 0.5 + 0.5 + 0 + 0.5 + 0.5) / 8),
    }  # fmt: skip
    assert batch.meta["generated_tokens"] == 8 * N * 3, "dropped groups included"


def test_surplus_is_not_carried_over() -> None:
    case = make(["mixed"] * 8, groups=3, per_round=4)
    assert case.uids(1) == [0, 1, 2]
    assert case.uids(2) == [4, 5, 6], "3 was sampled in step 1 and is not used again"


def test_batch_does_not_depend_on_the_size_of_the_rounds() -> None:
    kinds = ["low", "mixed", "high", "mixed", "mixed", "low", "mixed", "mixed", "gap", "mixed", "low", "high"]
    batches = [make(kinds, groups=4, per_round=size).next_batch() for size in (1, 2, 3, 4, 6, 12)]
    for batch in batches[1:]:
        assert all(torch.equal(batch.rows[name], batches[0].rows[name]) for name in batches[0].rows)
        assert all(torch.equal(batch.tokens[name], batches[0].tokens[name]) for name in batches[0].tokens)


def test_step_depends_only_on_its_number_and_the_position_of_the_stream() -> None:
    kinds = ["low", "mixed", "high", "mixed", "mixed", "low", "mixed", "mixed", "mixed", "low", "mixed", "low"]
    whole, resumed = make(kinds, groups=3, per_round=2), make(kinds, groups=3, per_round=2)
    whole.next_batch(1)
    resumed.stream.load(whole.stream.state())
    for step in (2, 3):
        mine, reference = resumed.next_batch(step), whole.next_batch(step)
        assert mine.meta == reference.meta and mine.objects == reference.objects
        assert torch.equal(mine.tokens["input_ids"], reference.tokens["input_ids"])


def test_first_pass_has_the_seeds_of_a_run_without_a_filter() -> None:
    plain, filtered = (make(["mixed"] * 4, groups=4, per_round=4, cap=cap) for cap in (None, 0))
    assert torch.equal(plain.next_batch().tokens["input_ids"], filtered.next_batch().tokens["input_ids"])


def test_each_rollback_gives_new_seeds() -> None:
    drawn = []
    for count in (0, 1, 2):
        case = make(["mixed"] * 4, groups=4, per_round=4, cap=None)
        case.sampler.rollbacks.count = count
        case.next_batch(step=3)
        drawn.append(case.engine.asked[0].rows["seed"].tolist())
    assert drawn[0] == [seed_of(7, "train", 3, uid, sample) for uid in range(4) for sample in range(N)]
    assert len({seed for seeds in drawn for seed in seeds}) == 3 * 4 * N


@pytest.mark.parametrize("balance", ["static", "tokens"])
def test_next_pass_resamples_dropped_prompts_with_new_seeds_and_skips_kept_ones(balance: str) -> None:
    case = make(["mixed", "low>mixed", "mixed", "low"], groups=3, per_round=4)
    case.engine.balance = balance
    cast(Any, case.sampler.policy).kept_share = 0.1  # a round is not expected to suffice
    batch = case.next_batch()
    assert case.engine.uids == [[0, 1, 2, 3], [1, 3]]
    assert batch.rows["uid"].tolist() == [0] * 4 + [2] * 4 + [1] * 4, "in the order in which they were sampled"
    assert batch.rows["group"].tolist() == [0] * 4 + [2] * 4 + [5] * 4, "the second time the prompt is another group"
    ids = [group * N + sample for group in (0, 2, 5) for sample in range(N)]
    assert batch.rows["trajectory"].tolist() == ids and not batch.rows["part"].any()
    first, again = case.engine.asked
    asked_again = first.tokens["input_ids"] == 1
    assert not set(first.rows["seed"][asked_again].tolist()) & set(again.rows["seed"].tolist())
    assert counts(batch)["groups"] == 6 and counts(batch)["rounds"] == 2


def test_round_of_kept_prompts_generates_nothing() -> None:
    case = make(["mixed", "mixed", "mixed", "low>mixed"], groups=4, per_round=2)
    assert case.uids() == [0, 1, 2, 3]
    assert case.engine.uids == [[0, 1], [2, 3], [3]]


def same_prompt_twice(*overrides: str, cap: int | None) -> Batch:
    """Batch of a round in which both prompts are the same row of the data."""
    case = make(["mixed", "low"], *overrides, groups=1, per_round=2, cap=cap)
    case.stream.data = cast(Any, [replace(prompt, uid=7) for prompt in cast(Any, case.stream.data)])
    return case.next_batch()


def test_groups_with_the_same_prompt_are_shaped_and_filtered_separately() -> None:
    shaped = same_prompt_twice("shaping.normalize=group", cap=None)
    assert shaped.rows["uid"].tolist() == [7] * 8 and shaped.rows["group"].tolist() == [0] * 4 + [1] * 4
    assert shaped.rows["reward"].tolist() == [-1.0, 1.0, -1.0, 1.0] + [0.0] * 4
    kept = same_prompt_twice(cap=0)
    assert kept.rows["group"].tolist() == [0] * 4 and counts(kept)["dropped_low"] == 1


def test_responses_begin_early_unless_a_reward_model_needs_the_engines_gpus() -> None:
    case = make(["mixed"], groups=1, per_round=1)
    engine, sampler = cast(Any, case.engine), case.sampler
    engine.groups = [object()]
    assert not sampler.may_begin_early, "static"
    engine.balance = "tokens"
    assert sampler.may_begin_early
    sampler.models = cast(Any, SimpleNamespace(group=engine.groups[0]))
    assert not sampler.may_begin_early
    sampler.models = cast(Any, SimpleNamespace(group=object()))
    assert sampler.may_begin_early


def test_validation_prompts_have_their_index_as_group() -> None:
    sampler = make(["mixed"] * 4, groups=4, per_round=4).sampler
    prompts = [Prompt(uid, (uid,), str(uid), "source", "mixed", {"uid": uid}, str(uid)) for uid in (8, 5, 6)]
    batch = sampler.generate_and_score(prompts, 2, SAMPLING, Phases(), purpose="validation", step=1)
    assert batch.rows["uid"].tolist() == [8, 8, 5, 5, 6, 6] and batch.rows["group"].tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("balance", ["static", "tokens"])
def test_error_at_the_cap_reports_the_counts(balance: str) -> None:
    case = make(["mixed", "low", "high", "lost", "low", "mixed"], groups=3, per_round=2, cap=2)
    case.engine.balance = balance
    with pytest.raises(ValueError) as caught:
        case.next_batch(5)
    assert str(caught.value) == (
        "step 5: algorithm.filter_groups kept 1 of the 3 groups that the batch needs (data.train_batch_size) in 2 rounds, and "
        "algorithm.filter_groups.max_num_gen_batches=2 is reached: of 4 groups 1 were all wrong (every answer score <= 0), 1 all "
        "right, 1 lost their answers to failed rewards; raise it (0: no cap), take prompts that the model solves now and then, "
        "or raise rollout.n"
    )
    assert case.engine.uids == [[0, 1], [2, 3]]
    assert make(["mixed", "low", "high", "mixed"], groups=2, per_round=2, cap=2).uids() == [0, 3], "full in the last round"


@pytest.mark.parametrize("cap", [0, -1])
def test_pass_that_keeps_nothing_ends_the_step_without_a_cap(cap: int) -> None:
    case = make(["mixed", "low", "high", "low", "high", "low"], groups=2, per_round=2, cap=cap)
    with pytest.raises(ValueError, match=r"kept 1 of the 2 .* in 4 rounds, and 3 rounds, a whole pass over the data, kept none"):
        case.next_batch()
    assert case.engine.uids == [[0, 1], [2, 3], [4, 5], [1]]


def test_group_status_depends_only_on_responses_with_a_score() -> None:
    case = make(["gap", "lost", "failed", "mixed"], groups=2, per_round=4)
    batch = case.next_batch()
    assert batch.rows["uid"].tolist() == [0] * 3 + [3] * 4, "three responses of gap remain, and they differ"
    assert counts(batch)["dropped_failed"] == 2 and counts(batch)["reward/failed"] == 1 + 3 + 4
    in_rounds = make(["gap", "lost", "failed", "mixed"], groups=2, per_round=2).next_batch()
    assert counts(in_rounds) == counts(batch) | {"rounds": 2.0}


def test_group_of_one_response_is_always_kept() -> None:
    assert make(["high", "failed", "low", "low"], groups=2, per_round=4, n=1).uids() == [0, 2]


def test_all_failed_rewards_are_an_error_in_the_first_round_only() -> None:
    with pytest.raises(ValueError, match="all 8 rewards of the step failed; the first: KeyError: 'x'"):
        make(["failed", "failed", "mixed", "mixed"], groups=1, per_round=2).next_batch()
    with pytest.raises(ValueError, match="all 8 rewards of the step failed"):
        make(["failed", "failed"], groups=2, per_round=2, cap=None).next_batch()
    assert make(["mixed", "low", "failed", "failed", "mixed", "low"], groups=2, per_round=2).uids() == [0, 4]


def test_rows_without_a_score_are_recorded_with_their_error_and_the_first_is_an_event() -> None:
    case = make(["low", "gap", "mixed", "lost"], groups=2, per_round=2, cap=None)
    case.next_batch(1)
    (aside,) = case.sampler.left_out
    assert aside.rows["uid"].tolist() == [1] and aside.objects["reward_error"] == ["KeyError: 'x' (reward.py:3)"]
    assert case.events == [(1, "reward", "1 of 8 rewards of training failed: KeyError: 'x' (reward.py:3)")]
    batch = case.next_batch(2)
    assert [part.rows["uid"].tolist() for part in case.sampler.left_out] == [[3] * 3], "of the last step only"
    assert batch.meta["metrics"]["reward/failed_share"] == 3 / 8 and len(case.events) == 1, "once for each kind"


def test_every_round_of_a_filter_counts_its_failures() -> None:
    case = make(["gap", "lost", "failed", "mixed"], groups=2, per_round=2)
    batch = case.next_batch()
    assert batch.meta["metrics"]["reward/failed_share"] == (1 + 3 + 4) / 16
    assert sum(map(len, case.sampler.left_out)) == 8


@pytest.mark.parametrize("score", [None, 0.0, -1.0])
def test_timed_out_reward_has_the_configured_score(score: float | None) -> None:
    """By default a late response is excluded, so a hanging scorer costs nothing: the others are all right, advantage 0."""
    case = make(["late"], f"timeout_score={'null' if score is None else score}", groups=1, per_round=1, cap=None)
    batch = case.next_batch()
    late = {"reward/failed_share": 0.5, "reward/timed_out_share": 0.5}
    if score is None:
        assert batch.rows["score"].tolist() == [1.0, 1.0] and batch.meta["metrics"] == {"reward/failed": 2} | late
    else:
        assert batch.rows["score"].tolist() == [1.0, score, 1.0, score] and batch.meta["metrics"] == {"reward/failed": 0} | late
        assert batch.objects["reward_error"] == [None, LATE] * 2 and not case.sampler.left_out
    assert case.events == [(1, "reward", f"2 of 4 rewards of training failed: {LATE}")]


def test_filter_compares_the_configured_metric() -> None:
    kinds = ["low", "mixed", "mixed", "high"]
    assert make(kinds, groups=2, per_round=4, metric="twice").uids() == [1, 2]
    assert make(kinds, groups=2, per_round=4, metric="acc").uids() == [1, 2], "the score, where the function reports no acc"
    with pytest.raises(
        ValueError, match=r"metric=accuracy: the reward function reports no such number .* acc, score, seq_reward, twice"
    ):
        make(kinds, groups=2, per_round=4, metric="accuracy").next_batch()


OVERLONG = (
    "reward_kwargs.max_resp_len=5", "reward_kwargs.overlong_buffer_cfg.enable=true", "reward_kwargs.overlong_buffer_cfg.len=4",
    "reward_kwargs.overlong_buffer_cfg.penalty_factor=0.8", "reward_kwargs.overlong_buffer_cfg.log=true",
)  # fmt: skip


def test_shaped_rewards_are_trained_on_and_the_score_stays() -> None:
    batch = make(["mixed", "low"], *OVERLONG, "shaping.clip=[-1.0,0.5]", groups=2, per_round=2, cap=None).next_batch()
    assert batch.rows["score"].tolist() == [0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    penalty = -0.8 * 2 / 4  # two of the three tokens are in the buffer
    expected = [penalty, 0.5, penalty, 0.5] + [penalty] * 4
    assert batch.rows["reward"].tolist() == pytest.approx(expected)
    sums = [float(row.sum()) for row in batch.split_rows("token_level_scores")]
    assert sums == pytest.approx(expected)
    assert all(row[-1] == row.sum() for row in batch.split_rows("token_level_scores")), "at the last token"
    assert batch.objects["reward_extra"][1] == {"twice": 2.0, "overlong_reward": pytest.approx(penalty), "overlong": 1.0}


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), min_size=1, max_size=6), st.integers(0, 10**6))
def test_single_turn_rewards_are_at_the_last_token_of_each_row(shapes: list[tuple[int, int]], seed: int) -> None:
    generator, (prompts, responses) = torch.Generator().manual_seed(seed), torch.tensor(shapes).T
    batch = Batch(prompts + responses)
    mask = (batch.positions() >= torch.repeat_interleave(prompts, batch.lengths)).float()
    of_models = torch.randn(batch.total_tokens, generator=generator) * mask
    batch = batch.with_tokens(response_mask=mask, model_rewards=of_models)
    reward, expected = torch.randn(len(batch), generator=generator), of_models.clone()
    expected[batch.offsets[1:] - 1] += reward - sum_by(of_models, batch.segment_ids(), len(batch)).float()
    assert torch.equal(token_rewards(batch, reward), expected)


def test_reward_of_a_row_that_ends_with_an_observation_is_at_its_last_sampled_token() -> None:
    mask = torch.tensor([int(mark) for mark in "01101010000"]).float()
    batch = Batch(torch.tensor([5, 4, 2]), tokens={"response_mask": mask})
    rows = Batch(batch.lengths, {"found": token_rewards(batch, torch.tensor([1.0, 2.0, 3.0]))}).split_rows("found")
    assert [row.tolist() for row in rows] == [[0.0, 0.0, 0.0, 0.0, 1.0], [0.0, 2.0, 0.0, 0.0], [0.0, 3.0]]


def test_truncated_response_is_penalized_at_its_last_token() -> None:
    """Before clipping, added to the overlong penalty, in training only; the score stays; a greedy baseline is penalized too."""
    overrides = ("missing_eos_penalty=0.7", *OVERLONG[:4], "shaping.clip=[-0.9,2.0]")
    case = make(["mixed", "low"], *overrides, groups=2, per_round=2, cap=None)
    case.engine.cut = (1, 4)
    batch = case.next_batch()
    whole, cut = -0.8 * 2 / 4, -0.8 * 1 / 4 - 0.7  # three trained tokens, and two
    assert batch.rows["reward"].tolist() == pytest.approx([whole, 1 + cut, whole, 1 + whole, -0.9, whole, whole, whole])
    assert batch.rows["score"].tolist() == [0.0, 1.0, 0.0, 1.0] + [0.0] * 4
    assert batch.lengths.tolist() == [4, 3, 4, 4, 3, 4, 4, 4]
    for row, reward in zip(batch.split_rows("token_level_scores"), batch.rows["reward"], strict=True):
        assert row[-1] == reward and not row[:-1].any(), "at EOS, or at the last token of a truncated response"
    greedy = make(["mixed"], "missing_eos_penalty=0.7", groups=1, per_round=1, cap=None, with_baselines=True)
    greedy.engine.cut = (N,)
    assert greedy.next_batch().rows["baseline"].tolist() == pytest.approx([0.5 - 0.7] * N)


def test_running_moments_include_the_training_batch_only() -> None:
    case = make(["low", "mixed", "high", "mixed"], "shaping.normalize=running", groups=2, per_round=4)
    batch = case.next_batch()
    assert case.sampler.shaping.running.state() == {"count": 8, "mean": 0.5, "squares": 2.0}
    assert batch.rows["reward"].tolist() == [-1.0, 1.0] * 4 and batch.rows["score"].tolist() == [0.0, 1.0] * 4


def test_each_row_has_the_reward_of_its_prompts_greedy_response() -> None:
    case = make(["mixed", "high", "gap"], groups=3, per_round=3, cap=None, with_baselines=True)
    batch = case.next_batch()
    (asked,) = case.engine.asked
    assert asked.rows["greedy"].tolist() == [False, False, False, False, True] * 3, "in one call with the samples"
    assert batch.rows["uid"].tolist() == [0] * 4 + [1] * 4 + [2] * 3 and batch.rows["sample"].tolist()[:4] == [0, 1, 2, 3]
    ids = [group * (N + 1) + sample for group in range(3) for sample in range(N)]
    assert batch.rows["trajectory"].tolist() == [id for id in ids if id != 2 * (N + 1) + 1], "the greedy ones have numbers too"
    assert batch.rows["baseline"].tolist() == [0.5] * 4 + [1.0] * 4 + [0.5] * 3
    assert batch.rows["score"].tolist() == [0.0, 1.0, 0.0, 1.0] + [1.0] * 4 + [0.0, 0.0, 1.0]
    assert batch.meta["generated_tokens"] == 3 * (N + 1) * 3
    plain = make(["mixed", "high", "gap"], groups=3, per_round=3, cap=None).next_batch()
    assert torch.equal(batch.tokens["input_ids"], plain.tokens["input_ids"]), "the samples are those without baselines"


def test_prompt_whose_baseline_failed_is_excluded() -> None:
    batch = make(["mixed", "no baseline", "mixed"], groups=3, per_round=3, cap=None, with_baselines=True).next_batch()
    assert batch.rows["uid"].tolist() == [0] * 4 + [2] * 4 and batch.meta["metrics"]["reward/failed"] == 4
    assert batch.meta["metrics"]["reward/failed_share"] == 1 / 15, "one of fifteen that were scored, greedy ones included"
    filtered = make(["no baseline", "low", "mixed", "mixed"], groups=2, per_round=2, with_baselines=True).next_batch()
    assert filtered.rows["uid"].tolist() == [2] * 4 + [3] * 4 and counts(filtered)["dropped_failed"] == 1
    assert filtered.rows["baseline"].tolist() == [0.5] * 8
    with pytest.raises(ValueError, match="the first: of the greedy answer: KeyError: 'x'"):
        make(["no baseline"], groups=1, per_round=1, cap=None, with_baselines=True).next_batch()


def test_baseline_is_shaped_like_the_rewards_of_its_prompt() -> None:
    overrides = (*OVERLONG, "shaping.clip=[-0.3,0.5]", "shaping.normalize=group")
    batch = make(["mixed", "low"], *overrides, groups=2, per_round=2, cap=None, with_baselines=True).next_batch()
    # mixed: 0 - 0.4 and 1 - 0.4, clipped to -0.3 and 0.5: mean 0.1, spread 0.4; the greedy answer's 0.5 - 0.4 is 0.1
    assert batch.rows["reward"].tolist() == pytest.approx([-1.0, 1.0, -1.0, 1.0] + [0.0] * 4, abs=1e-6)
    assert batch.rows["baseline"].tolist() == pytest.approx([0.0] * 8, abs=1e-6)
    greedy_alone = make(["high"], "shaping.normalize=running", groups=1, per_round=1, cap=None, with_baselines=True)
    greedy_alone.next_batch()
    assert greedy_alone.sampler.shaping.running.count == N, "baselines do not count"


@pytest.mark.parametrize(("normalize", "with_baselines"), [("running", False), ("group", True)])
def test_parts_of_a_trajectory_are_shaped_filtered_and_rewarded_once(
    monkeypatch: pytest.MonkeyPatch, normalize: str, with_baselines: bool
) -> None:
    """The penalty is that of the whole length; statistics count trajectories; the reward is at the last trained token."""
    overrides = ("missing_eos_penalty=0.7", *OVERLONG, "shaping.clip=[-1.0,2.0]", f"shaping.normalize={normalize}")
    cases = [make(["mixed", "low", "gap"], *overrides, groups=2, per_round=3, with_baselines=with_baselines) for _ in range(2)]
    for case in cases:
        case.engine.cut = (1, 4, 8)
    expected, sampler = cases[0].next_batch(), cases[1].sampler
    as_parts = partial(in_parts, seed=3)
    monkeypatch.setattr(sampler, "with_penalties", lambda batch: Sampler.with_penalties(sampler, as_parts(batch)))
    found = cases[1].next_batch()
    assert len(found) > len(expected) and counts(found) == counts(expected)
    view = Trajectories.of(found)
    whole = view.joined(found)
    for name in ("group", "score", "reward", *(["baseline"] if with_baselines else [])):
        assert torch.equal(whole.rows[name], expected.rows[name]), name
        assert torch.equal(found.rows[name], expected.rows[name][view.of_row]) or name == "score", name
    assert whole.objects["reward_extra"] == expected.objects["reward_extra"]
    assert sampler.shaping.running.state() == cases[0].sampler.shaping.running.state()
    rewards, marks = found.tokens["token_level_scores"], found.tokens["response_mask"].bool()
    assert not rewards[~marks].any() and int(rewards.count_nonzero()) == int(
        expected.tokens["token_level_scores"].count_nonzero()
    )
    by_token = rewards[marks][found.tokens["serial"][marks].argsort()]
    assert torch.equal(by_token, expected.tokens["token_level_scores"][expected.tokens["response_mask"].bool()])


def test_servers_receive_conversations_with_the_prompt_that_has_their_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt of the dataset is shorter: prompt and response are cut where the session's first prompt ends."""
    tokenizer = character_tokenizer("0123456789+T")
    texts = ["T1+1", "T1+12", "T2+2"]
    ids = [tokenizer(text)["input_ids"] for text in (texts[0] + "3", texts[1] + "45", texts[2] + "6")]
    case, sent = make(["low"], groups=1, per_round=1, cap=None), dict[int, Response]()
    sampler = case.sampler
    sampler.tokenizer, sampler.agents = tokenizer, AgentSessions(cast(Any, None), max_prompt=9, max_tokens=9)
    sampler.rewards = RemoteRewards(["http://localhost:1"], compose("ppo_trainer", PPOConfig, ()).reward.remote)
    monkeypatch.setattr(sampler.rewards, "submit", lambda answers, keys: sent.update(zip(keys, answers, strict=True)))
    prompts = [Prompt(uid, (uid,), "1+1", "mine", "2", {}, [{"role": "user", "content": "1+1"}]) for uid in (0, 0, 1)]
    turns = [*prompts[0].messages, {"role": "assistant", "content": "45"}]
    session: dict[str, Any] = {"reward": None, "extra": {"num_turns": 2}, "messages": turns, "turns": [(1, 5, 7, 0, 0, 9)]}
    facts = [session, session, session | {"reward": 0.5, "turns": []}]
    rows = Batch(
        lengths=torch.tensor([len(row) for row in ids]),
        tokens={"input_ids": torch.tensor([token for row in ids for token in row])},
        rows={
            "id": torch.tensor([4, 4, 5]),
            "part": torch.tensor([0, 1, 0]),
            "finished": torch.ones(3, dtype=torch.int64),
            "prompt_length": torch.tensor([len(text) for text in texts]),
        },
        objects={"session": facts},
    )
    submitted = sampler.submit(rows, rows, prompts)
    first, second, other = submitted.rows["score_key"].tolist()
    assert first == second != other
    ((key, response),) = sent.items()
    assert key == first and (response.prompt, response.written, response.solution_str) == ("T1+12", "45", "45")
    assert response.ids == ids[1] and response.extra_info == {"num_turns": 2}
    assert response.messages == turns and response.whole


class LastTokens:
    """Reward models: the score of a row is its last token, that of a sampled token half its id."""

    group = None

    def add(self, rules: list[Score], answers: Batch, prompts: Any, texts: list[str], *, learn_from: torch.Tensor) -> Any:
        self.read = ([row.tolist() for row in answers.split_rows("input_ids")], prompts, texts, learn_from.tolist())
        ids, mask = answers.tokens["input_ids"], answers.tokens["response_mask"]
        return [Score(row[-1], {}, None) for row in self.read[0]], ids * mask / 2


def test_reward_models_score_the_last_row_of_a_session() -> None:
    rows = Batch(
        torch.tensor([2, 3, 2]),
        {"input_ids": torch.tensor([1, 2, 3, 4, 5, 6, 7]), "response_mask": torch.tensor([0.0, 1, 0, 1, 1, 0, 1])},
        {"trajectory": torch.tensor([4, 4, 5]), "part": torch.tensor([0, 1, 0])},
    )
    models, learn, rules = LastTokens(), torch.tensor([True, True, False]), [Score(0.0, {}, None)] * 3
    args: Any = (models, rules, rows, ["a", "a", "b"], ["x", "y", "z"], learn, Phases())
    scores, at_tokens = Sampler._score_by_models(*args)
    assert models.read == ([[3, 4, 5], [6, 7]], ["a", "b"], ["y", "z"], [True, False])
    assert [score.value for score in scores] == [5, 5, 7], "each row of a session has its score"
    assert at_tokens is not None and at_tokens.tolist() == [0, 0, 0, 2, 2.5, 0, 3.5]


def test_sessions_of_several_rows_reach_reward_models_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, models = make(["low"], groups=1, per_round=1, cap=None).sampler, LastTokens()
    sampler.models = cast(Any, models)
    monkeypatch.setattr(sampler, "rollout", SimpleNamespace(rest=lambda group: None))
    monkeypatch.setattr(sampler, "_finish", lambda keys: [Score(0.0, {}, None) for _ in keys])
    rows = Batch(
        torch.tensor([2, 3, 2]),
        {"input_ids": torch.tensor([1, 2, 3, 4, 5, 6, 7]), "response_mask": torch.tensor([0.0, 1, 0, 1, 1, 0, 1])},
        {name: torch.tensor(column) for name, column in {"id": [0, 0, 1], "part": [0, 1, 0], "score_key": [8, 8, 9]}.items()},
        {"response": ["x", "y", "z"]},
    )
    asked = [Prompt(0, (0,), "", "mine", "2", {}, [])] * 2
    again = rows.select([0, 1, 2])
    scored = sampler.finish_scoring(rows, asked, [0, 1], Phases(), n=2, step=1, trains=True, overlap=None)
    assert models.read[0] == [[3, 4, 5], [6, 7]] and scored.rows["score"].tolist() == [5, 5, 7] and models.read[3] == [True, True]
    known = {asked[0].ordinal}
    sampler.finish_scoring(again, asked, [0, 1], Phases(), n=2, step=2, trains=True, overlap=None, known=known)
    assert models.read[3] == [False, False], "scored again, and not learned from"


def test_a_failed_session_of_several_rows_is_one_failed_response(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = make(["low"], groups=1, per_round=1, cap=None).sampler
    lost, fine = Score(None, {}, "broken"), Score(1.0, {}, None)
    monkeypatch.setattr(sampler, "_finish", lambda keys: [lost if key == 8 else fine for key in keys])
    columns = {"id": [0, 0, 0, 1], "part": [0, 1, 2, 0], "score_key": [8, 8, 8, 9]}
    rows = Batch(
        torch.tensor([1, 1, 1, 1]),
        {"input_ids": torch.tensor([1, 2, 3, 4])},
        {name: torch.tensor(column) for name, column in columns.items()},
        {"response": ["x"] * 4},
    )
    sampler.finish_scoring(
        rows, [Prompt(0, (0,), "", "mine", "2", {}, [])] * 2, [0, 1], Phases(), n=2, step=1, trains=True, overlap=None
    )
    assert sampler.failures.metrics()["reward/failed_share"] == 0.5


def test_a_late_response_is_wrong_where_others_are_right_or_wrong() -> None:
    """Otherwise the decisive number of a validation, and of filtered groups, would be the score in steps with a timeout."""
    sampler, late = make(["late"], "timeout_score=-1", groups=1, per_round=1, cap=None).sampler, Score(None, {}, LATE, True)
    asked = [Prompt(0, (0,), "", source, "", {}, "") for source in ("math", "math", "other", "other")]
    scores = [Score(-1.0, {"acc": 0.0}, None), late, Score(0.5, {"length": 3.0}, None), late]
    found = sampler._with_timeout_scores(scores, asked)
    assert [(score.value, score.extra) for score in found] == [
        (-1.0, {"acc": 0.0}), (-1.0, {"acc": 0.0}), (0.5, {"length": 3.0}), (-1.0, {})
    ]  # fmt: skip
    model_late = replace(late, extra={"acc": 1.0})
    both = sampler._with_timeout_scores([late, model_late], asked[:2])
    assert [score.extra for score in both] == [{"acc": 0.0}, {"acc": 1.0}], "also where all are late; a rule's stays"


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6), st.booleans()), min_size=1, max_size=9))
def test_join_and_decode_equal_row_by_row_construction(shapes: list[tuple[int, int, bool]]) -> None:
    """Compared with concatenating and decoding each row."""
    asked, written = (torch.tensor(lengths) for lengths in list(zip(*shapes, strict=True))[:2])
    stops = torch.tensor([int(done and length > 0) for _, length, done in shapes])
    questions = Batch(asked, {"input_ids": torch.arange(int(asked.sum()))})
    ids, log_probs = 100 + torch.arange(int(written.sum())), torch.rand(int(written.sum()))
    columns = {"input_ids": ids, "rollout_log_probs": log_probs, "weight_version": torch.arange(len(ids), dtype=torch.int32)}
    answers = Batch(written, columns, {"finished": stops})
    whole = join_responses(questions, answers)
    reference, actual = questions.split_rows("input_ids"), answers.split_rows("input_ids")
    pairs = [torch.cat(pair) for pair in zip(reference, actual, strict=True)]
    assert [row.tolist() for row in whole.split_rows("input_ids")] == [pair.tolist() for pair in pairs]
    masks = [[0.0] * len(question) + [1.0] * len(answer) for question, answer in zip(reference, actual, strict=True)]
    assert [row.tolist() for row in whole.split_rows("response_mask")] == masks
    of_answers = whole.tokens["response_mask"].bool()
    assert torch.equal(whole.tokens["rollout_log_probs"][of_answers], log_probs)
    versions = whole.tokens["weight_version"]
    assert torch.equal(versions[of_answers], columns["weight_version"]) and (versions[~of_answers] == -1).all()
    assert not whole.tokens["rollout_log_probs"][~of_answers].any() and torch.equal(whole.rows["prompt_length"], asked)
    read = [" ".join(map(str, row[: len(row) - int(done)].tolist())) for row, done in zip(actual, stops, strict=True)]
    assert decode_responses(answers, cast(Any, Decoder())) == read
