import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from configs.schema.ppo import JudgeRewardConfig
from tests.trainer.rewards.config import reward_config
from tests.trainer.rewards.server import Reply, Server
from trainer.rewards.pool.runner import RewardRunner
from trainer.rewards.rules.judge import JudgeError, parse, prompt, score
from trainer.rewards.scoring import Response

INFO = {"question": "1 + 1?"}


class Judge(Server):
    def __init__(self) -> None:
        super().__init__()
        self.reply: Callable[[int], Reply] = lambda n: (200, completion("Score: 1"), 0.0)

    def reply_to(self, n: int, body: Any) -> Reply:
        return self.reply(n)


def completion(text: Any) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[Judge]:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with Judge() as server, server.listening():
        yield server


def config(judge: Judge, **changes: Any) -> JudgeRewardConfig:
    url = f"http://127.0.0.1:{judge.server_port}/v1"
    return reward_config(judge={"url": url, "model": "large", "backoff": 0.01} | changes).judge


def test_a_request_is_a_chat_completion(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    assert score("two", "2", INFO, config(judge)) == 1.0
    monkeypatch.setenv("JUDGE_KEY", "secret")
    score(
        "two",
        "2",
        INFO,
        config(judge, api_key_env="JUDGE_KEY", prompt="Is {answer} {ground_truth}?", temperature=0.5, max_tokens=7),
    )
    (path, no_key, first), (_, key, second) = judge.asked
    assert (path, no_key, key) == ("/v1/chat/completions", None, "Bearer secret")
    text = first["messages"][0]["content"]
    assert "1 + 1?" in text and "two" in text and "Score: X" in text
    assert second == {
        "model": "large",
        "messages": [{"role": "user", "content": "Is two 2?"}],
        "temperature": 0.5,
        "max_tokens": 7,
    }


def test_filled_in_text_is_not_expanded_again() -> None:
    assert prompt("{answer}|{ground_truth}|{other}|{}", "{ground_truth}", "2", {}) == "{ground_truth}|2|{other}|{}"
    with pytest.raises(ValueError, match="the row's extra_info has no question"):
        prompt("{question}", "a", "2", {"question": None})  # as of a parquet file in which other rows have one
    with pytest.raises(ValueError, match="the row's extra_info has no question"):
        prompt("{question}", "", "", {})


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ("Score: 1", 1.0),
        ("Fine.\n**Score:** 0.5", 0.5),
        ("score = .25", 0.25),
        ("Score: 0\nNo, wait.\nScore: 1.", 1.0),
        ("**Score: 1**", 1.0),
        ("`Score: 0`", 0.0),
    ],
)
def test_the_last_score_of_the_reply_counts(reply: str, value: float) -> None:
    assert parse(reply, 1.0) == value
    assert parse(reply, 2.0) == value / 2


@pytest.mark.parametrize("reply", ["", "It is right.", "Score: high", "Score: 1/2", "Score: 10", "Score: -1", "Score: 1.5"])
def test_a_reply_without_a_score_is_a_failure(reply: str) -> None:
    with pytest.raises(JudgeError):
        parse(reply, 1.0)


def test_long_reply_is_parsed_quickly() -> None:
    start = time.monotonic()
    for part in ("score", "score:", "9", "*", " ", "score*"):
        with pytest.raises(JudgeError):
            parse(part * 100_000, 1.0)
    assert time.monotonic() - start < 1.0


@pytest.mark.parametrize("status", [429, 500, 503])
def test_transient_failure_is_retried(judge: Judge, status: int) -> None:
    judge.reply = lambda n: (status, b"busy", 0.0) if n < 3 else (200, completion("Score: 1"), 0.0)
    start = time.monotonic()
    assert score("two", "2", INFO, config(judge, retries=2, backoff=0.05)) == 1.0
    assert len(judge.asked) == 3 and time.monotonic() - start >= 0.15  # 0.05 s, then twice as long
    with pytest.raises(JudgeError, match=f"after 1 requests; the last: HTTP {status}"):
        judge.asked.clear()
        score("two", "2", INFO, config(judge, retries=0))


@pytest.mark.parametrize(
    ("status", "reply", "message"),
    [
        (401, b"who are you?", "HTTP 401 from .*: who are you"),
        (404, b"", "HTTP 404"),
        (302, b"", "HTTP 302"),  # a redirect would carry the key away
        (200, {"choices": []}, "not a chat completion"),
        (200, {"error": "x"}, "not a chat completion"),
        (200, "[]", "not a chat completion"),
        (200, completion(None), "has no text"),
        (200, completion("fine"), "no `Score: X`"),
    ],
)
def test_permanent_failure_is_not_retried(judge: Judge, status: int, reply: Any, message: str) -> None:
    judge.reply = lambda n: (status, reply, 0.0)
    with pytest.raises(JudgeError, match=message):
        score("two", "2", INFO, config(judge))
    assert len(judge.asked) == 1


def test_late_and_unreachable_judges_raise(judge: Judge) -> None:
    judge.reply = lambda n: (200, completion("Score: 1"), 5.0)
    start = time.monotonic()
    with pytest.raises(JudgeError, match=r"after 2 requests; the last: .*time"):
        score("two", "2", INFO, config(judge, timeout=0.2, retries=1))
    assert time.monotonic() - start < 4.0
    with pytest.raises(JudgeError, match="Connection refused"):
        score("two", "2", INFO, config(judge, url="http://127.0.0.1:1/v1"))


def test_slowly_dripping_reply_times_out(judge: Judge) -> None:
    judge.reply = lambda n: (200, [b" "] * 100, 0.0)
    start = time.monotonic()
    with pytest.raises(JudgeError, match=r"not complete within reward\.judge\.timeout"):
        score("two", "2", INFO, config(judge, timeout=0.3, retries=0))
    assert time.monotonic() - start < 2.0


@pytest.mark.parametrize("missing", ["url", "model"])
def test_missing_judge_key_is_an_error(missing: str) -> None:
    with pytest.raises(JudgeError, match=rf"no judge is configured: .*reward\.judge\.{missing}=None"):
        score("two", "2", INFO, reward_config(judge={"url": "http://127.0.0.1:1/v1", "model": "large"} | {missing: None}).judge)


def test_invalid_json_is_retried(judge: Judge) -> None:
    judge.reply = lambda n: (200, b"<html>", 0.0) if n == 1 else (200, completion("Score: 0.5"), 0.0)
    assert score("two", "2", INFO, config(judge)) == 0.5


@pytest.mark.parametrize("num_workers", [0, 2])
def test_many_requests_are_in_flight_and_a_failed_judge_is_a_failed_reward(judge: Judge, num_workers: int) -> None:
    """32 responses at 0.2 s each: one after the other they would take 6.4 s."""
    judge.reply = lambda n: (200, completion("Score: 1") if n != 5 else completion("?"), 0.2)
    changes = {"url": f"http://127.0.0.1:{judge.server_port}/v1", "model": "large", "concurrency": 16}
    answers = [Response("of my own", f"answer {i}", "2", INFO, finished=True) for i in range(32)]
    with RewardRunner(reward_config(num_workers=num_workers, scorer="judge", judge=changes)) as runner:
        runner.wait_ready()
        start = time.monotonic()
        scores = runner.score(answers)
        took = time.monotonic() - start
    assert took < 3.0 and 8 <= judge.most_at_once <= 16
    failed = [score for score in scores if score.value is None]
    assert len(failed) == 1 and "no `Score: X`" in (failed[0].error or "")
    assert all(score.value == 1.0 for score in scores if score.error is None)
