import asyncio
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from trainer.rewards.scoring import Response, Score, score_all, score_one

ANSWER = Response("source", "text", "truth", {"index": 3}, finished=True)


def returning(result: Any) -> Any:
    return score_one(lambda **_: result, ANSWER)


def test_function_is_called_as_verl_calls_it() -> None:
    def function(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
        assert (data_source, solution_str, ground_truth) == ("source", "text", "truth")
        assert extra_info == {"index": 3, "finished": True}
        return 0.5

    assert score_one(function, ANSWER).value == 0.5
    assert ANSWER.extra_info == {"index": 3}


@pytest.mark.parametrize("number", [1, True, 1.0, np.float32(1), np.int64(1), np.bool_(True), Decimal(1), Fraction(1)])
def test_numbers_of_any_library_are_scores(number: Any) -> None:
    score = returning(number)
    assert score.value == 1.0 and type(score.value) is float and score.error is None


@pytest.mark.parametrize(
    "bad", [None, "1.0", float("nan"), float("inf"), [1.0], {"acc": 1.0}, {}, {"score": "high"}, 10**400, -1e60]
)
def test_non_finite_reward_is_an_error_and_not_zero(bad: Any) -> None:
    score = returning(bad)
    assert score.value is None and score.error


def test_dict_gives_score_and_metrics() -> None:
    score = returning(
        {"score": -0.5, "acc": True, "length": np.int32(7), "pred": "42", "nan": float("nan"), "none": None, "big": 1e200}
    )
    assert (score.value, score.extra, score.error) == (-0.5, {"acc": 1.0, "length": 7.0}, None)


@pytest.mark.parametrize("error", [ValueError("two\nlines"), KeyError("x"), RecursionError(), SystemExit(2)])
def test_exception_becomes_one_line_with_its_location(error: BaseException) -> None:
    def function(**_: Any) -> float:
        raise error

    score = score_one(function, ANSWER)
    assert score.value is None and score.error is not None
    assert score.error.startswith(type(error).__name__) and "test_scoring.py:" in score.error and "\n" not in score.error


ANSWERS = [ANSWER, Response("other", "words", None, {"index": 4}, finished=False)]


def returning_all(results: Any) -> list[Score]:
    return list(score_all(lambda solution_strs, **_: results, ANSWERS, threads=1))


def test_batch_function_is_called_once_as_verl_calls_it() -> None:
    calls = []

    def function(
        data_sources: list[str], solution_strs: list[str], ground_truths: list[Any], extra_infos: list[dict[str, Any]]
    ) -> Any:
        calls.append((data_sources, solution_strs, ground_truths, extra_infos))
        return np.array([1, 0.5], np.float32)

    assert [score.value for score in score_all(function, ANSWERS, threads=1)] == [1.0, 0.5]
    infos = [{"index": 3, "finished": True}, {"index": 4, "finished": False}]
    assert calls == [(["source", "other"], ["text", "words"], ["truth", None], infos)]


def test_async_functions_are_awaited() -> None:
    async def single(solution_str: str, **_: Any) -> float:
        await asyncio.sleep(0)
        return float(len(solution_str))

    async def batch(solution_strs: list[str], **_: Any) -> list[float]:
        return [float(len(text)) for text in solution_strs]

    for function, threads in ((single, 1), (single, 2), (batch, 1)):
        assert [score.value for score in score_all(function, ANSWERS, threads=threads)] == [4.0, 5.0]


def test_each_reward_of_a_batch_is_read_like_a_single_one() -> None:
    assert returning_all([{"score": 1, "acc": True}, float("nan")]) == [
        Score(1.0, {"acc": 1.0}, None),
        Score(None, {}, "the reward is nan, not a finite number within float32"),
    ]
    assert [score.value for score in returning_all(iter((1, 0)))] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("results", "message"), [([1.0], "the function returned 1 rewards for 2 responses"), (0.5, "TypeError: 'float' object")]
)
def test_batch_result_of_wrong_length_fails_all_responses(results: Any, message: str) -> None:
    scores = returning_all(results)
    assert len(scores) == 2 and all(score.value is None and (score.error or "").startswith(message) for score in scores)
