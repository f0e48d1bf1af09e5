"""Rewards from servers that fail in every way, over real sockets."""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from tests.trainer.rewards.config import reward_config
from tests.trainer.rewards.pool.test_runner import wait_until
from tests.trainer.rewards.server import Reply, Server
from trainer.rewards.pool.runner import RewardRunner
from trainer.rewards.remote.remote_rewards import RemoteRewards, needs_data_sources, open_rewards
from trainer.rewards.scoring import Response, Score


class Rewards(Server):
    """Server whose reward is the number in the response, unless ``instead`` replaces the n-th reply."""

    def __init__(self) -> None:
        super().__init__()
        self.instead: Callable[[int], Reply | None] = lambda n: None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/get_reward"

    def reply_to(self, n: int, body: Any) -> Reply:
        return self.instead(n) or (200, {"rewards": [float(text) for text in body["responses"]]}, 0.0)


@pytest.fixture
def servers() -> Iterator[tuple[Rewards, Rewards]]:
    with Rewards() as first, Rewards() as second, first.listening(), second.listening():
        yield first, second


def answers(n: int) -> list[Response]:
    return [Response("mine", str(i), f"truth {i}", {"i": i}, i % 2 == 0, f"prompt {i}: ", f"{i}<eos>") for i in range(n)]


def remote(*servers: Rewards, **changes: Any) -> RemoteRewards:
    config = reward_config(remote={"batch_size": 4, "backoff": 0.01, "timeout": 5.0} | changes).remote
    return RemoteRewards([server.url for server in servers], config)


def good(n: int) -> list[Score]:
    return [Score(float(i), {}, None) for i in range(n)]


def test_batches_are_spread_over_the_servers(servers: tuple[Rewards, Rewards]) -> None:
    for server in servers:
        server.instead = lambda n: (200, {"rewards": [0.5] * 4}, 0.1)
    scores = remote(*servers, concurrency=8).score(answers(64))
    assert scores == [Score(0.5, {}, None)] * 64
    assert [len(server.asked) for server in servers] == [8, 8]
    assert all(2 <= server.most_at_once <= 6 for server in servers), "several in flight, 8 over both"
    path, token, body = servers[0].asked[0]
    assert (path, token, len(body["query"])) == ("/get_reward", None, 4)


def test_scores_come_in_order_with_a_last_batch_that_is_small(servers: tuple[Rewards, Rewards]) -> None:
    assert remote(*servers, concurrency=3).score(answers(11)) == good(11)
    assert Counter(len(body["query"]) for server in servers for _, _, body in server.asked) == {4: 2, 3: 1}
    assert remote(*servers).score([]) == []


def test_unreachable_server_causes_no_delay_if_another_is_up(
    servers: tuple[Rewards, Rewards], capsys: pytest.CaptureFixture[str]
) -> None:
    gone, other = Rewards(), servers[1]
    gone.server_close()
    rewards = remote(gone, other, concurrency=1, backoff=60.0)  # a pause would show in the time
    start = time.monotonic()
    assert rewards.score(answers(40)) == good(40)
    assert time.monotonic() - start < 5.0 and len(other.asked) == 10
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"note: reward server: {gone.url}: URLError") and "refused" in lines[0]


def test_recovered_server_is_used_again(servers: tuple[Rewards, Rewards], capsys: pytest.CaptureFixture[str]) -> None:
    first, second = servers
    first.instead = lambda n: (503, b"loading", 0.0) if n < 2 else None
    rewards = remote(first, second, concurrency=1, backoff=0.05)
    assert rewards.score(answers(8)) == good(8) and len(first.asked) == 1, "it is still in back-off"
    time.sleep(0.15)
    assert rewards.score(answers(16)) == good(16) and len(first.asked) > 1
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        f"note: reward server: HTTP 503 from {first.url}: loading",
        f"note: reward server {first.url} responds again",
    ]


def test_full_requests_are_sent_before_the_result_is_asked_for(servers: tuple[Rewards, Rewards]) -> None:
    server, rewards = servers[0], remote(servers[0], batch_size=4)
    rewards.submit([answers(10)[place] for place in (7, 2, 0, 5, 9)], [7, 2, 0, 5, 9])
    wait_until(lambda: len(server.asked) == 1)
    rewards.submit([answers(10)[place] for place in (1, 3, 4, 6, 8)], [1, 3, 4, 6, 8])
    assert rewards.finish(range(10)) == good(10) and len(server.asked) == 3
    assert rewards.score(answers(3)) == good(3), "nothing is left of the call before"


def test_a_later_batch_waits_while_another_is_finished(servers: tuple[Rewards, Rewards]) -> None:
    rewards = remote(servers[0], batch_size=4)
    rewards.submit(answers(6), range(100, 106))
    rewards.submit(answers(3), (20, 10, 15))
    assert rewards.finish([20, 10, 15]) == good(3), "two of the later batch were sent with them"
    assert rewards.finish([105, *range(100, 105)]) == [good(6)[5], *good(6)[:5]]


@pytest.mark.parametrize("failure", [(500, b"oops", 0.0), (200, b"<html>", 0.0), (429, b"", 0.0)])
def test_transient_failure_of_all_servers_is_retried(servers: tuple[Rewards, Rewards], failure: Reply) -> None:
    server = servers[0]
    server.instead = lambda n: failure if n < 3 else None
    start = time.monotonic()
    assert remote(server, retries=2, backoff=0.05).score(answers(4)) == good(4)
    assert len(server.asked) == 3 and time.monotonic() - start >= 0.15  # 0.05 s, then twice as long


def test_slow_server_times_out(servers: tuple[Rewards, Rewards]) -> None:
    slow, other = servers
    slow.instead = lambda n: (200, {"rewards": [9.0] * 4}, 3.0)
    start = time.monotonic()
    assert remote(slow, other, timeout=0.3, concurrency=2).score(answers(16)) == good(16)
    failed = remote(slow, timeout=0.2, retries=1).score(answers(4))
    assert time.monotonic() - start < 2.5
    assert all(score.value is None and "after 2 requests; the last: " in (score.error or "") for score in failed)
    assert "timed out" in (failed[0].error or "")
    assert not any(score.timed_out for score in failed), "which of them is slow, or the server itself, is not known"
    slow.instead = lambda n: (200, {"rewards": [9.0]}, 3.0)
    assert [score.timed_out for score in remote(slow, timeout=0.2, retries=0, batch_size=1).score(answers(1))] == [True]


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ((401, b"who are you?", 0.0), r"HTTP 401 from .*: who are you\? \(REWARD_SERVER_TOKEN is not set here\)$"),
        ((404, b"", 0.0), "HTTP 404"),
        ((302, b"", 0.0), "HTTP 302"),  # a redirect would carry the token away
        ((200, {"rewards": [1.0] * 5}, 0.0), "get_reward: 5 rewards for 4 responses"),
        ((200, {"reward": 1.0}, 0.0), 'its reply has no list "rewards"'),
    ],
)
def test_permanent_failure_is_retried_on_another_server_only(
    servers: tuple[Rewards, Rewards], failure: Reply, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REWARD_SERVER_TOKEN", raising=False)
    wrong, other = servers
    wrong.instead = lambda n: failure
    failed = remote(wrong).score(answers(4))
    assert len(wrong.asked) == 1 and [score.value for score in failed] == [None] * 4
    with pytest.raises(ValueError, match=message):
        raise ValueError(failed[0].error)
    assert remote(wrong, other).score(answers(4)) == good(4)


def test_only_the_affected_responses_fail(servers: tuple[Rewards, Rewards]) -> None:
    """The second request is lost, one reward of the third is NaN, and a value that is not JSON is not sent."""
    server = servers[0]
    partly: dict[int, Reply] = {2: (400, b"no", 0.0), 3: (200, {"rewards": [8.0, float("nan"), 10.0, 11.0]}, 0.0)}
    server.instead = partly.get
    asked = answers(16)
    asked[13] = Response("mine", "13", {1, 2}, {}, True)
    scores = remote(server, concurrency=1).score(asked)
    assert [i for i, score in enumerate(scores) if score.value is None] == [4, 5, 6, 7, 9, 13]
    assert [score.value for score in scores if score.value is not None] == [0, 1, 2, 3, 8, 10, 11, 12, 14, 15]
    assert "nan, not a finite number" in (scores[9].error or "")
    assert "cannot be sent as JSON: Object of type set" in (scores[13].error or "")


def test_token_is_sent_and_is_in_no_error(servers: tuple[Rewards, Rewards], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "a-long-secret\n")
    server = servers[0]
    server.instead = lambda n: (403, b"not a-long-secret", 0.0)
    (score,) = remote(server, token_env="MY_TOKEN").score(answers(1))
    assert server.asked[0][1] == "Bearer a-long-secret"
    assert "not ***" in (score.error or "")


def test_ready_when_one_server_accepts_connections(servers: tuple[Rewards, Rewards]) -> None:
    gone = Rewards()
    gone.server_close()
    remote(gone, servers[0]).wait_ready()
    start = time.monotonic()
    with pytest.raises(ValueError, match=rf"^reward.remote_urls: no server accepts a connection: {gone.url}: .*refused$"):
        remote(gone, timeout=0.3).wait_ready()
    assert 0.3 <= time.monotonic() - start < 2.0
    assert servers[0].asked == []


def test_remote_urls_select_servers(servers: tuple[Rewards, Rewards]) -> None:
    plain, asking = reward_config(), reward_config(remote_urls=[servers[0].url])
    assert isinstance(open_rewards(plain), RewardRunner) and needs_data_sources(plain)
    assert not needs_data_sources(asking) and not needs_data_sources(reward_config(scorer="math"))
    with open_rewards(asking) as rewards:
        rewards.start()
        assert rewards.score(answers(3)) == good(3)


def test_server_of_openrlhf_is_supported() -> None:
    """A server that reads OpenRLHF's fields only and ignores the others."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            lengths = [len(q) - len(p) for q, p in zip(data["query"], data["prompts"], strict=True)]
            rewards = [n + int(label.split()[1]) for n, label in zip(lengths, data["labels"], strict=True)]
            reply = json.dumps({"rewards": rewards, "scores": rewards, "extra_logs": {"lengths": lengths}}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ExitStack() as stack:
        server = stack.enter_context(HTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        stack.callback(server.shutdown)
        config = reward_config(remote={"batch_size": 2}).remote
        scores = RemoteRewards([f"http://127.0.0.1:{server.server_port}/get_reward"], config).score(answers(5))
    assert scores == [Score(float(6 + i), {"lengths": 6.0}, None) for i in range(5)]
