"""The wire format between trainer and reward server, and OpenRLHF's."""

import json
from typing import Any

import pytest

from trainer.rewards.remote.openrlhf_protocol import from_reply, from_request, to_reply, to_request
from trainer.rewards.scoring import Response, Score

ANSWERS = [
    Response(
        "openai/gsm8k",
        "It is #### 4",
        "4",
        {"index": 1, "nested": {"a": [0.1, None]}},
        True,
        "What is 2 + 2? ",
        "<b>It is #### 4<eos>",
    ),
    Response("mine", "", None, {}, False, "ü \u2028", ""),
    Response("", "no prompt", {"tests": [1]}, {}, True),
]
SCORES = [
    Score(0.1 + 0.2, {"acc": 1.0}, None),
    Score(None, {}, "ValueError: no"),
    Score(None, {}, "timed out after 30 s", timed_out=True),
    Score(-1e-308, {"acc": 0.0, "more": 3.5}, None),
]


def sent(value: Any) -> Any:
    return json.loads(json.dumps(value, allow_nan=False))


def test_responses_and_scores_round_trip_bitwise() -> None:
    assert from_request(sent(to_request(ANSWERS))) == ANSWERS
    assert from_reply(sent(to_reply(SCORES)), 4) == SCORES


def test_request_has_the_fields_of_openrlhf() -> None:
    request = to_request(ANSWERS)
    assert request["query"] == ["What is 2 + 2? <b>It is #### 4<eos>", "ü \u2028", "no prompt"]
    assert request["prompts"] == ["What is 2 + 2? ", "ü \u2028", ""]
    assert request["labels"] == ["4", None, {"tests": [1]}]


def test_request_of_openrlhf_is_read() -> None:
    """Its older versions send queries alone."""
    request = {"query": ["Q: 1? #### 1</s>", "other"], "prompts": ["Q: 1? ", "Q: 2? "], "labels": ["1", None]}
    assert from_request(request) == [
        Response("", "#### 1</s>", "1", {}, True, "Q: 1? ", ""),
        Response("", "other", None, {}, True, "", ""),
    ]
    assert from_request({"query": ["whole"], "prompts": None}) == [Response("", "whole", None, {}, True)]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([], "must be a JSON object"),
        ({}, "must be a JSON object"),
        ({"query": "text"}, "a list of texts"),
        ({"query": []}, "a list of texts"),
        ({"query": [1]}, r'"query"\[0\] is 1; it must be str'),
        ({"query": ["a", None]}, r'"query"\[1\] is None; it must be str'),
        ({"query": ["a"], "prompts": []}, '"prompts" must be a list as long as "query", 1'),
        ({"query": ["a"], "labels": "1"}, '"labels" must be a list as long as "query", 1'),
        ({"query": ["a"], "finished": [1]}, r'"finished"\[0\] is 1; it must be bool'),
        ({"query": ["a"], "extra_infos": [None]}, r'"extra_infos"\[0\] is None; it must be dict'),
    ],
)
def test_invalid_request_raises(body: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_request(body)


def test_reply_of_openrlhf_is_read() -> None:
    assert from_reply({"rewards": [1, 0.5]}, 2) == [Score(1.0, {}, None), Score(0.5, {}, None)]
    same = {"rewards": [1.0, 0.5], "scores": [1.0, 0.5], "extra_logs": {"dummy_scores": [1.0, 0.5], "loss": 2, "name": "x"}}
    assert [score.extra for score in from_reply(same, 2)] == [
        {"dummy_scores": 1.0, "loss": 2.0},
        {"dummy_scores": 0.5, "loss": 2.0},
    ]
    others = {"rewards": [1.5, 0.5], "scores": [1.0, 0.0]}
    assert [score.extra for score in from_reply(others, 2)] == [{"scores": 1.0}, {"scores": 0.0}]


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf"), "0.5", [0.5]])
def test_nonnumeric_reward_fails_only_its_response(reward: Any) -> None:
    first, second = from_reply({"rewards": [0.5, reward], "extra_logs": {"acc": [1, 1]}}, 2)
    assert first == Score(0.5, {"acc": 1.0}, None)
    assert second.value is None and second.extra == {} and "not a finite number" in (second.error or "")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([0.5], 'no list "rewards"'),
        ({"reward": [0.5]}, 'no list "rewards": .*reward'),
        ({"rewards": 0.5}, 'no list "rewards"'),
        ({"rewards": []}, "0 rewards for 1 responses"),
        ({"rewards": [0.5, 0.5]}, "2 rewards for 1 responses"),
    ],
)
def test_invalid_reply_raises(body: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_reply(body, 1)


def test_logs_of_another_length_are_ignored() -> None:
    assert from_reply({"rewards": [1, 2], "extra_logs": {"a": [1], "b": [1, None]}, "errors": ["x"]}, 2) == [
        Score(1.0, {"b": 1.0}, None),
        Score(2.0, {}, None),
    ]
