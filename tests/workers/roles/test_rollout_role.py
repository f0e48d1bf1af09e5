"""What the rollout role asks of its engine."""

from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from tests.trainer.data.tokenizers import byte_tokenizer
from workers.batch import Batch
from workers.compilation import COMPILE_TIME
from workers.roles.rollout_role import RolloutRole, requests_of
from workers.rollout.base import Completion, NewTokens, Request, Sampling

SAMPLING = Sampling(temperature=0.7, top_k=5, top_p=0.9, max_tokens=3, stop_token_ids=(1,))


class Engine:
    """Completes one request per step, the last one first."""

    prefilled: int | None = None

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.unfinished = 0

    def submit(self, requests: list[Request]) -> None:
        self.requests += requests
        self.unfinished += len(requests)

    def step(self) -> list[Completion]:
        self.unfinished -= 1
        r = self.requests[self.unfinished]
        return [Completion(r.id, r.prompt_ids[:1], (-0.5,), "length" if r.seed else "stop", (4,))]

    def abort(self) -> list[Completion]:
        return [Completion(0, (5, 6), (0.0, 0.0), "length", (4, 4)), Completion(1, (7,), (0.0,), "abort", (4,))]


class Awake:
    def enter(self, phase: str) -> None:
        assert phase == "generate"


def test_greedy_rows_are_greedy_whatever_the_sampling() -> None:
    engine = Engine()
    prompts = Batch(
        torch.tensor([2, 1, 2]),
        tokens={"input_ids": torch.tensor([5, 6, 7, 8, 9])},
        rows={"id": torch.tensor([3, 4, 5]), "seed": torch.tensor([10, 11, 0]), "greedy": torch.tensor([False, True, False])},
    )
    role = RolloutRole(cast(Any, engine), cast(Any, None), cast(Any, Awake()), cast(Any, None))
    answers = role.advance(prompts, SAMPLING, 2)
    assert [request.sampling.temperature for request in engine.requests] == [0.7, 0.0, 0.7]
    assert engine.requests[0].sampling is SAMPLING and engine.requests[1].sampling.max_tokens == 3
    assert [(request.prompt_ids, request.seed) for request in engine.requests] == [((5, 6), 10), ((7,), 11), ((8, 9), 0)]
    assert answers.tokens["input_ids"].tolist() == [8, 7] and answers.rows["finished"].tolist() == [1, 0]
    assert answers.rows["id"].tolist() == [5, 4] and answers.tokens["weight_version"].tolist() == [4, 4]
    assert all(request.response_ids == () for request in engine.requests)
    assert role.advance(None, SAMPLING, 9).rows["id"].tolist() == [3] and engine.unfinished == 0


def test_begun_responses_are_continued_from_their_last_tokens() -> None:
    prompts = Batch(
        torch.tensor([4, 2]),
        tokens={"input_ids": torch.tensor([5, 6, 7, 8, 9, 9])},
        rows={"id": torch.tensor([3, 4]), "seed": torch.tensor([1, 2]), "greedy": torch.zeros(2), "begun": torch.tensor([3, 0])},
    )
    first, second = requests_of(prompts, SAMPLING)
    assert (first.prompt_ids, first.response_ids, second.prompt_ids, second.response_ids) == ((5,), (6, 7, 8), (9, 9), ())


class Synced(Awake):
    def enter(self, phase: str, role: str | None = None) -> None:
        assert phase in ("generate", "sync")

    def share_weights_of(self, role: str | None) -> None:
        pass

    def take_seconds(self) -> dict[str, float]:
        return {}


def synced(engine: Any) -> RolloutRole:
    return RolloutRole(engine, None, cast(Any, Synced()), cast(Any, lambda version, keep_cache: (False, {})))


@pytest.mark.parametrize(("known", "begun", "expected"), [(True, 3, {"timing_s/recompute": 0.5}), (True, 0, {}), (False, 3, {})])
def test_seconds_of_recomputation_are_reported_where_responses_were_submitted_again(
    known: bool, begun: int, expected: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of 1.5, 1 and 1 s; the first computes four tokens of a request."""
    clock = iter([0.0, 1.5, 2.0, 3.0, 3.0, 4.0])
    monkeypatch.setattr("workers.roles.rollout_role.time.perf_counter", lambda: next(clock))

    class Counting(Engine):
        def step(self) -> list[Completion]:
            self.prefilled = None if not known else 4 if self.unfinished == 3 else 0
            return super().step()

    prompts = Batch(
        torch.tensor([4, 2, 2]),
        tokens={"input_ids": torch.arange(8)},
        rows={name: torch.tensor([0, 1, 2]) for name in ("id", "seed")}
        | {"greedy": torch.zeros(3), "begun": torch.tensor([begun, 0, 0])},
    )
    monkeypatch.setattr(COMPILE_TIME, "seconds", 0.0)
    role = synced(Counting())
    role.advance(prompts, SAMPLING, 9)
    assert {name: metric.value for name, metric in role.sync_weights(1).items()} == expected
    assert role.sync_weights(2) == {}


def test_seconds_of_compilation_are_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(COMPILE_TIME, "seconds", 2.5)
    role = synced(Engine())
    assert {name: metric.value for name, metric in role.sync_weights(1).items()} == {"timing_s/compile": 2.5}
    assert role.sync_weights(2) == {}


def test_suspended_responses_that_ended_before_are_marked() -> None:
    role = RolloutRole(cast(Any, Engine()), cast(Any, None), cast(Any, Awake()), cast(Any, None))
    found = role.suspend()
    assert found.rows["ended"].tolist() == [True, False] and found.rows["id"].tolist() == [0, 1]
    assert found.lengths.tolist() == [2, 1]


def test_own_sampling_of_requests_replaces_the_shared_one() -> None:
    prompts = Batch(
        torch.tensor([1, 1]),
        tokens={"input_ids": torch.tensor([5, 6])},
        rows={
            "id": torch.tensor([0, 1]), "seed": torch.tensor([1, 2]), "greedy": torch.tensor([False, True]),
            "temperature": torch.tensor([0.3, 0.4], dtype=torch.float64), "top_p": torch.tensor([0.9, 1.0], dtype=torch.float64),
            "top_k": torch.tensor([4, -1]), "max_tokens": torch.tensor([7, 8]),
        },
    )  # fmt: skip
    first, second = (request.sampling for request in requests_of(prompts, SAMPLING))
    assert first == replace(SAMPLING, temperature=0.3, top_p=0.9, top_k=4, max_tokens=7)
    assert second == replace(SAMPLING, temperature=0.0, top_p=1.0, top_k=-1, max_tokens=8)


def test_streamed_call_returns_new_tokens_of_unfinished_responses_and_aborts_before_its_steps() -> None:
    class Streaming(Engine):
        aborted: tuple[int, ...] = ()

        def abort(self, ids: Any = None) -> list[Completion]:
            self.aborted = tuple(ids)
            return []

        def new_tokens(self) -> list[NewTokens]:
            assert self.unfinished == 1, "after the steps"
            return [NewTokens(3, [7, 8], [-0.25, -0.5], [4, 4])]

    engine = Streaming()
    prompts = Batch(
        torch.tensor([1, 1]),
        tokens={"input_ids": torch.tensor([5, 6])},
        rows={"id": torch.tensor([3, 4]), "seed": torch.tensor([1, 2]), "greedy": torch.tensor([False, False])},
    )
    role = RolloutRole(cast(Any, engine), cast(Any, None), cast(Any, Awake()), cast(Any, None))
    part = role.advance(prompts, SAMPLING, 1, (9,), True)
    assert engine.aborted == (9,)
    assert part.rows["id"].tolist() == [4, 3] and part.rows["ended"].tolist() == [True, False]
    assert part.tokens["input_ids"].tolist() == [6, 7, 8]


def test_role_with_a_tokenizer_returns_the_texts_of_responses() -> None:
    """Without the stop token, and not of the parts of responses that are streamed."""
    prompts = Batch(
        torch.tensor([1, 1]),
        tokens={"input_ids": torch.tensor([5, 6])},
        rows={"id": torch.tensor([0, 1]), "seed": torch.tensor([0, 1]), "greedy": torch.zeros(2)},
    )
    parts = [cast(Any, part) for part in (Engine(), None, Awake(), None)]
    tokenizer = byte_tokenizer()
    role = RolloutRole(*parts, tokenizer=tokenizer)
    assert role.advance(prompts, SAMPLING, 9).objects == {"response": [tokenizer.decode([6]), ""]}
    assert role.advance(None, SAMPLING, 9).objects == {"response": []}
    assert RolloutRole(*parts).advance(prompts, SAMPLING, 9).objects == {}
