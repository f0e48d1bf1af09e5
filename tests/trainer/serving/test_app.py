"""Authorization, limits and replies of the reward server, over a real socket."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.serving import serving
from tests.trainer.rewards.config import reward_config
from trainer.rewards.pool.runner import RewardRunner
from trainer.rewards.remote.remote_rewards import RemoteRewards
from trainer.rewards.scoring import Response, Score

JSON = {"Content-Type": "application/json"}
TOKEN = {"Authorization": "Bearer correct-horse"}
ONE = {"query": ["Q: 2 + 2? #### 4"], "prompts": ["Q: 2 + 2? "], "labels": ["4"]}


def request(url: str, body: Any = None, headers: dict[str, str] = JSON, *, method: str = "POST") -> tuple[int, Any]:
    """Status and reply. body: sent as it is if it is bytes, else as JSON."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10)
    try:
        connection.request(method, parts.path, body if isinstance(body, bytes | None) else json.dumps(body), headers)
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())
    finally:
        connection.close()


BODY = json.dumps(ONE).encode()
HEAD = f"POST /get_reward HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(BODY)}\r\n\r\n".encode()
NO_ERROR = {"errors": [None], "timed_out": [False]}


def test_openrlhf_client_gets_rewards() -> None:
    with serving("reward.scorer=gsm8k") as url:
        status, reply = request(url, ONE)
        assert status == 200 and reply == {"rewards": [1.0], "scores": [1.0], "extra_logs": {}, **NO_ERROR}
        assert request(url, {"query": ["#### 4", "#### 5"], "labels": ["4", "none"]})[1]["rewards"] == [1.0, None]
        health = url.replace("get_reward", "health")
        output = {"status": "ok", "serves": "gsm8k", "requests": 2, "answers": 3, "failed": 1}
        assert request(health, headers={}, method="GET") == (200, output)
        assert request(url.replace("get_reward", "openapi.json"), method="GET")[0] == 404


@pytest.fixture(scope="module")
def small() -> Iterator[str]:
    """A server with a scorer for each data source, with a limit of 64 KB."""
    with serving("server.max_request_mb=0.0625") as url:
        yield url


@pytest.mark.parametrize(
    ("body", "headers", "status", "output"),
    [
        (ONE, {}, 415, "must be application/json, not nothing"),
        (ONE, {"Content-Type": "text/plain"}, 415, "not text/plain"),
        (b"{", JSON, 422, "Expecting property name"),
        (b"\xff", JSON, 422, "can't decode"),
        (b'{"query": ["a"], "extra_infos": [{"a": ' + b"[" * 60 + b"]" * 60 + b"}]}", JSON, 422, "the body: nested too deeply"),
        (b"[" * 30_000 + b"]" * 30_000, JSON, 422, "the body is nested too deeply"),
        ({"query": []}, JSON, 422, 'a JSON object with "query"'),
        ({"query": ["a"], "data_sources": ["gsm9k"]}, JSON, 422, "data_source 'gsm9k' has no scorer"),
        (ONE, JSON, 422, "data_source '' has no scorer"),
        ({"query": ["x" * 70_000]}, JSON, 413, "larger than server.max_request_mb=0.0625; send less at once"),
    ],
)
def test_invalid_request_is_a_one_line_error(small: str, body: Any, headers: dict[str, str], status: int, output: str) -> None:
    found, reply = request(small, body, headers)
    assert found == status and output in reply["detail"] and "\n" not in reply["detail"]


def test_large_request_without_a_length_is_stopped(small: str) -> None:
    """Sent in chunks."""
    parts = urlsplit(small)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10)
    connection.request("POST", parts.path, (b" " * 1024 for _ in range(80)), JSON, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


def test_client_that_disconnects_causes_no_output(capfd: pytest.CaptureFixture[str]) -> None:
    """Like a trainer that is killed: before the request is complete, and while it waits."""
    there = threading.Event()

    def score(answers: Sequence[Response]) -> list[Score]:
        there.set()
        time.sleep(0.2)
        return [Score(1.0, {}, None)] * len(answers)

    with serving("reward.scorer=gsm8k", score=score) as url:
        place = ("127.0.0.1", urlsplit(url).port)
        for sent in (HEAD + BODY[:5], HEAD + BODY):
            with socket.create_connection(place) as connection:
                connection.sendall(sent)
                if sent.endswith(BODY):
                    there.wait(5.0)
        assert request(url, ONE)[0] == 200
    assert capfd.readouterr().err == ""


def test_requests_whose_client_has_gone_are_not_scored() -> None:
    """They wait while a batch is scored: a client that times out asks again, and the server would do the work of both."""
    scored: list[int] = []
    begun, go = threading.Event(), threading.Event()

    def score(answers: Sequence[Response]) -> list[Score]:
        begun.set()
        go.wait(10.0)
        scored.append(len(answers))
        return [Score(1.0, {}, None)] * len(answers)

    with serving("reward.scorer=gsm8k", score=score) as url:
        place = ("127.0.0.1", urlsplit(url).port)
        first = socket.create_connection(place)
        first.sendall(HEAD + BODY)
        begun.wait(5.0)
        for _ in range(3):
            with socket.create_connection(place) as connection:
                connection.sendall(HEAD + BODY)
                time.sleep(0.2)
        time.sleep(0.2)
        go.set()
        assert request(url, ONE)[0] == 200
        first.close()
    assert scored == [1, 1]


def test_request_without_the_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_SERVER_TOKEN", "correct-horse")
    with serving("reward.scorer=gsm8k") as url:
        for headers in (JSON, JSON | {"Authorization": "Bearer wrong-horse"}, JSON | {"Authorization": "Basic correct-horse"}):
            status, reply = request(url, b"not even read", headers)
            assert status == 401 and "correct" not in reply["detail"]
        assert request(url, ONE, JSON | TOKEN)[0] == 200
        assert request(url.replace("get_reward", "health"), headers={}, method="GET")[0] == 200
        config = reward_config().remote
        answer = Response("", "#### 4", "4", {}, True)
        assert RemoteRewards([url], config).score([answer]) == [Score(1.0, {}, None)]
        monkeypatch.setenv("REWARD_SERVER_TOKEN", "wrong-horse")
        (score,) = RemoteRewards([url], config).score([answer])
        assert score.value is None and (score.error or "").startswith(f"no score from reward.remote_urls: HTTP 401 from {url}: ")


def test_remote_scores_are_the_local_ones_bitwise(tmp_path: Any) -> None:
    """Scores, additional numbers, failures, and the function's arguments."""
    function = tmp_path / "mine.py"
    function.write_text("""
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "3":
        raise ValueError("as asked")
    score = float("nan") if solution_str == "4" else (int(solution_str) + 1) / 3
    return {"score": score, "third": extra_info["third"], "truth": ground_truth["a"], "ended": extra_info["finished"]}
""")
    custom = {"path": str(function)}
    answers = [Response("mine", str(i), {"a": i / 7}, {"third": i / 3}, i % 2 == 0, "Q: ", f"{i}<eos>") for i in range(40)]
    with RewardRunner(reward_config(num_workers=0, custom_reward_function=custom)) as runner:
        local = runner.score(answers)
    with serving(f"reward.custom_reward_function.path={function}") as url:
        remote = RemoteRewards([url], reward_config(remote={"batch_size": 7}).remote).score(answers)
    assert remote == local and [i for i, score in enumerate(remote) if score.value is None] == [3, 4]
    assert len(local[0].extra) == 3


def test_concurrent_requests_are_scored_together() -> None:
    sizes: list[int] = []

    def score(answers: Sequence[Response]) -> list[Score]:
        sizes.append(len(answers))
        time.sleep(0.3)
        return [Score(float(answer.solution_str), {}, None) for answer in answers]

    answers = [Response("", str(i), None, {}, True) for i in range(32)]
    with serving("reward.scorer=gsm8k", "server.batch_size=16", score=score) as url:
        remote = RemoteRewards([url], reward_config(remote={"batch_size": 2, "concurrency": 16}).remote)
        assert [result.value for result in remote.score(answers)] == [float(i) for i in range(32)]
    assert sum(sizes) == 32 and max(sizes) <= 16 and len(sizes) < 8, "16 requests"


def test_too_many_requests_get_a_retry_status() -> None:
    there = threading.Event()

    def score(answers: Sequence[Response]) -> list[Score]:
        there.wait(10.0)
        return [Score(1.0, {}, None)] * len(answers)

    with serving("reward.scorer=gsm8k", "server.max_connections=3", score=score) as url:
        replies: list[int] = []
        parts = urlsplit(url)

        def ask() -> None:
            connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10)
            connection.request("POST", parts.path, json.dumps(ONE), JSON)
            replies.append(connection.getresponse().status)
            connection.close()

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        timeout = time.monotonic() + 5.0
        while len(replies) < 4 and time.monotonic() < timeout:
            time.sleep(0.01)
        there.set()
        for thread in threads:
            thread.join(10.0)
        assert set(replies) == {200, 503} and replies[:4] == [503] * 4
