"""Sums of several models' and the rules' scores, computed by hand."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer.rewards.config import scoring_model
from trainer.algorithms.moments import RunningMoments
from trainer.rewards.models.reward_models import Moments, RewardModel, RewardModels
from trainer.rewards.scoring import Score
from workers.batch import Batch

ROWS = Batch(torch.tensor([2, 3]), tokens={"response_mask": torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0])})
ALL = torch.tensor([True, True])


@dataclass
class FixedScores:
    """Scorer with fixed scores, None for failures. tokens: scores of tokens, for a model with kind=token."""

    values: Sequence[float | None]
    tokens: Tensor | None = None

    def score(self, answers: Batch, prompts: Any, texts: Any) -> tuple[list[Score], Tensor | None]:
        return [Score(value, {}, None if value is not None else "too long") for value in self.values], self.tokens


def model(
    *values: float | None, name: str = "a", moments: Any = None, tokens: Tensor | None = None, **changes: Any
) -> RewardModel:
    return RewardModel(name, scoring_model(**changes), FixedScores(values, tokens), moments)


def add(
    models: Sequence[RewardModel],
    rules: Sequence[Score],
    *,
    weight: float = 1.0,
    rules_asked: bool = True,
    learn: Tensor | None = ALL,
) -> tuple[list[Score], Tensor | None]:
    together = RewardModels(models, rule_weight=weight, asks_rules=rules_asked)
    return together.add(rules, ROWS, [], [], learn_from=learn)


def test_value_is_the_weighted_sum_and_extra_has_the_parts() -> None:
    rules = [Score(1.0, {"length": 3.0}, None), Score(0.0, {"length": 4.0, "acc": 0.5}, None)]
    models = [model(2.0, -4.0, weight=0.5), model(5.0, 7.0, name="b", weight=-2, moments=Moments(3.0, 4.0), clip=(-1.0, 0.75))]
    scores, at_tokens = add(models, rules, weight=0.25)
    assert at_tokens is None
    assert [score.value for score in scores] == [0.25 * 1 + 0.5 * 2 - 2 * 0.5, 0.5 * -4 - 2 * 0.75]
    assert scores[0].extra == {"acc": 1.0, "length": 3.0, "a": 2.0, "b": 5.0}
    assert scores[1].extra == {"acc": 0.5, "length": 4.0, "a": -4.0, "b": 7.0}


def test_score_without_rules_has_no_acc() -> None:
    scores, _ = add([model(2.0, -4.0)], [Score(0.0, {}, None)] * 2, rules_asked=False)
    assert [(score.value, score.extra) for score in scores] == [(2.0, {"a": 2.0}), (-4.0, {"a": -4.0})]


def test_reward_of_an_environment_has_the_weight_of_a_rule() -> None:
    scores, _ = add([model(2.0, -4.0)], [Score(3.0, {}, None)] * 2, rules_asked=False, weight=0.5)
    assert [(score.value, score.extra) for score in scores] == [(3.5, {"a": 2.0}), (-2.5, {"a": -4.0})]


def test_running_moments_record_training_responses_only() -> None:
    moments = RunningMoments()
    scores, _ = add([model(2.0, 6.0, moments=moments)], [Score(0.0, {}, None)] * 2)
    assert [score.value for score in scores] == [-1.0, 1.0] and (moments.count, moments.mean, moments.std) == (2, 4.0, 2.0)
    scores, _ = add([model(8.0, 1e9, moments=moments, clip=(-1.0, 1.0), weight=0.5)], [Score(1.0, {}, None)] * 2, learn=None)
    assert [score.value for score in scores] == [1 + 0.5 * 8.0, 1 + 0.5 * 1e9] and moments.count == 2, "a measurement: raw"
    scores, _ = add([model(10.0, 14.0, moments=moments)], [Score(0.0, {}, None)] * 2, learn=torch.tensor([True, False]))
    assert scores[1].value == pytest.approx((14.0 - moments.mean) / moments.std), "normalised with training responses"
    assert (moments.count, moments.mean) == (3, 6.0)
    add([model(None, 1e9, moments=moments)], [Score(0.0, {}, None)] * 2, learn=torch.tensor([True, False]))
    assert moments.count == 3, "a failure is no score"


def test_validation_score_rises_with_the_raw_reward() -> None:
    """For a policy that improves ever more slowly; normalised by running moments the score would fall from 1.1 to 0.6."""
    moments, measured = RunningMoments(), []
    for step in range(1, 11):
        level = 4.0 * (1 - 2.0**-step)
        values = (level - 0.5, level + 0.5)
        add([model(*values, moments=moments)], [Score(0.0, {}, None)] * 2)
        scores, _ = add([model(*values, moments=moments)], [Score(0.0, {}, None)] * 2, learn=None)
        measured.append(sum(score.value or 0.0 for score in scores) / 2)
    assert measured == sorted(measured) and measured[-1] == pytest.approx(4.0, abs=0.01)


def test_late_score_of_a_rule_stays_late() -> None:
    rules = [Score(-1.0, {}, "timed out after 30 s", True), Score(None, {}, "timed out after 30 s", True)]
    scores, _ = add([model(2.0, None, weight=0.5)], rules)
    assert [(score.value, score.timed_out, score.error) for score in scores] == [
        (0.0, True, "timed out after 30 s"), (None, True, "timed out after 30 s")
    ]  # fmt: skip


def test_state_is_that_of_running_moments() -> None:
    moments = RunningMoments()
    together = RewardModels(
        [model(moments=moments), model(name="b", moments=Moments(1.0, 2.0)), model(name="c")], rule_weight=1.0, asks_rules=True
    )
    moments.update(torch.tensor([1.0, 5.0]))
    state = together.state()
    assert [*state] == ["a"]
    moments.update(torch.tensor([100.0]))
    together.load(state)
    assert (moments.count, moments.mean, moments.std) == (2, 3.0, 2.0)


def test_failed_part_fails_the_sum_with_the_first_error() -> None:
    rules = [Score(1.0, {}, None), Score(None, {"length": 1.0}, "KeyError: 'x'")]
    scores, _ = add([model(None, 3.0), model(None, None, name="b")], rules)
    assert scores[0] == Score(None, {"acc": 1.0}, "reward model a: too long")
    assert scores[1] == Score(None, {"length": 1.0, "a": 3.0}, "KeyError: 'x'")


def test_number_with_the_name_of_a_model_raises() -> None:
    with pytest.raises(ValueError, match="the reward function reports a number a, also the name of a reward model"):
        add([model(1.0, 2.0)], [Score(0.0, {"a": 1.0}, None)] * 2)


def test_rewards_of_tokens_are_weighed_and_clipped_one_by_one() -> None:
    tokens = torch.tensor([9.0, 0.5, 9.0, -3.0, 0.25])
    models = [
        model(0.5, -2.75, kind="token", weight=2, clip=(-1.0, 1.0), tokens=tokens),
        model(0.5, -2.75, name="b", kind="token", weight=0, tokens=tokens),
        model(1.0, 1.0, name="c"),
    ]
    scores, at_tokens = add(models, [Score(0.0, {}, None)] * 2)
    assert at_tokens is not None and at_tokens.tolist() == [0.0, 1.0, 0.0, -2.0, 0.5]
    assert [score.value for score in scores] == [1.0 + 1.0, -1.5 + 1.0]
    assert scores[1].extra == {"acc": 0.0, "a": -2.75, "b": -2.75, "c": 1.0}
