"""Validation on given responses."""

from typing import Any, cast

import pytest
import torch

from trainer.rollout.validation import Validation
from workers.batch import Batch
from workers.rollout.base import Sampling

EXTRA: list[dict[str, float]] = [{"acc": 1.0, "format": 0.5}, {"acc": 0.0, "format": 1.0}, {}]


class Answers:
    """One response to each prompt; the last prompt's reward fails. split: a response has two rows, and only the last counts."""

    def __init__(self, split: bool) -> None:
        self.split = split
        self.asked: list[list[int]] = []

    def generate_and_score(self, prompts: list[int], n: int, *_: Any, purpose: str, step: int) -> Batch:
        assert (n, purpose, step) == (1, "validation", 7)
        self.asked.append(prompts)
        answers = Batch(
            torch.ones(len(prompts), dtype=torch.int64),
            rows={
                "uid": torch.tensor(prompts),
                "sample": torch.zeros(len(prompts)),
                "score": torch.tensor([1.0, -1.0, 0.0])[prompts],
                "reward_failed": torch.tensor([False, False, True])[prompts],
            },
            objects={"reward_extra": [EXTRA[i] for i in prompts], "reward_error": [[None, None, "late"][i] for i in prompts]}
            | {name: ["math"] * len(prompts) for name in ("data_source", "prompt", "response", "ground_truth")},
        )
        answers.rows |= {"trajectory": torch.arange(len(prompts)), "part": torch.ones(len(prompts), dtype=torch.int64)}
        if not self.split:
            return answers
        first = answers.with_rows(
            part=0 * answers.rows["part"], score=answers.rows["score"] + 9, reward_failed=answers.rows["sample"] == 0
        )
        return Batch.concat([first, answers])


class Log:
    def log_samples(self, samples: list, step: int) -> None:
        assert step == 7 and [sample["uid"] for sample in samples] == [0, 1, 2]
        assert [sample["reward_error"] for sample in samples] == [None, None, "late"]


@pytest.mark.parametrize("split", [False, True])
def test_validation_measures_reported_numbers_and_excludes_failed_rewards(split: bool) -> None:
    sampler = Answers(split)
    sampling = Sampling(temperature=0.0, top_k=-1, top_p=1.0, max_tokens=4, stop_token_ids=())
    data: Any = [0, 1, 2]
    validation = Validation(data, cast(Any, sampler), cast(Any, Log()), n=1, sampling=sampling, batch_size=2)
    found = validation.run(7)
    assert sampler.asked == [[0, 1], [2]]
    assert found == validation.first == validation.last
    assert found == {
        "val/reward_failed": 1.0,
        "val-core/math/acc/mean@1": 0.5,
        "val-aux/math/format/mean@1": 0.75,
        "val-aux/math/reward/mean@1": 0.0,
        "val/accuracy": 0.5,
        "val/accuracy_std": 0.5,
        "val/accuracy_min": 0.0,
        "val/partial_credit": 0.0,
        "val/problems": 2.0,
    }
