"""What the rollout role asks of its engine."""

from typing import Any, cast

import torch

from workers.batch import Batch
from workers.roles.rollout_role import RolloutRole
from workers.rollout.base import Completion, Request, Sampling

SAMPLING = Sampling(temperature=0.7, top_k=5, top_p=0.9, max_tokens=3, stop_token_ids=(1,))


class Engine:
    def __init__(self) -> None:
        self.requests: list[Request] = []

    def generate(self, requests: list[Request]) -> list[Completion]:
        self.requests = requests
        return [Completion(r.id, r.prompt_ids[:1], (-0.5,), "length" if r.seed else "stop", (4,)) for r in requests]


class Awake:
    def enter(self, phase: str) -> None:
        assert phase == "generate"


def test_greedy_rows_are_greedy_whatever_the_sampling() -> None:
    engine = Engine()
    prompts = Batch(
        torch.tensor([2, 1, 2]),
        tokens={"input_ids": torch.tensor([5, 6, 7, 8, 9])},
        rows={"seed": torch.tensor([10, 11, 0]), "greedy": torch.tensor([False, True, False])},
    )
    answers = RolloutRole(cast(Any, engine), cast(Any, None), cast(Any, Awake()), cast(Any, None)).generate(prompts, SAMPLING)
    assert [request.sampling.temperature for request in engine.requests] == [0.7, 0.0, 0.7]
    assert engine.requests[0].sampling is SAMPLING and engine.requests[1].sampling.max_tokens == 3
    assert [(request.prompt_ids, request.seed) for request in engine.requests] == [((5, 6), 10), ((7,), 11), ((8, 9), 0)]
    assert answers.tokens["input_ids"].tolist() == [5, 7, 8] and answers.rows["finished"].tolist() == [0, 0, 1]
