"""Rewards from servers (``reward.remote_urls``): concurrent requests, load-balanced over healthy servers."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Lock
from types import TracebackType

from configs.base.addresses import LONGEST_PAUSE
from configs.base.secrets import hidden
from configs.schema.ppo import RemoteConfig, RemoteScoringConfig
from trainer.rewards.http_client import RequestRefused, TransientError, connection_problem, post, with_retries
from trainer.rewards.pool.runner import RewardRunner
from trainer.rewards.remote import openrlhf_protocol
from trainer.rewards.rules.reward_registry import scores_by_source
from trainer.rewards.scoring import DaemonThreads, Response, Rewards, Score, ScoringProgress
from workers.controller.logs import tell

_POLL_SECONDS = 0.1
"""Interval of connection attempts while no server is available yet."""


@dataclass(slots=True)
class _Server:
    """State of one server. requests: total so far. failures: consecutive ones. Before retry_at it is the last choice."""

    url: str
    requests: int = 0
    in_flight: int = 0
    failures: int = 0
    retry_at: float = 0.0


class RemoteRewards:
    """Rewards by HTTP, with the interface of RewardRunner. The servers of ``urls`` are replicas: each request goes to one."""

    def __init__(self, urls: Sequence[str], config: RemoteConfig, key: str = "reward.remote_urls") -> None:
        """Sends nothing yet. key: configuration key of the URLs, for messages."""
        self._config = config
        self._key = key
        self._servers = [_Server(url) for url in urls]
        self._lock = Lock()
        self._threads = DaemonThreads(self._score, config.concurrency)
        self._waiting: list[tuple[int, Response]] = []
        self._requests: list[tuple[Sequence[int], Future[list[Score]]]] = []
        self._scores: dict[int, Score] = {}
        """Scores that came with those of another ``finish``."""
        self.progress = ScoringProgress()

    def start(self) -> None:
        """Do nothing: servers are not started by the run."""

    def wait_ready(self) -> None:
        """Wait until a server accepts connections, for it may still be loading. Raises ValueError after a request's timeout."""
        deadline = time.monotonic() + self._config.timeout
        while True:
            problems = [connection_problem(server.url, self._config.timeout) for server in self._servers]
            if None in problems:
                return
            if time.monotonic() >= deadline:
                raise ValueError(f"{self._key}: no server accepts a connection: {problems[0]}")
            time.sleep(_POLL_SECONDS)

    def __enter__(self) -> RemoteRewards:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Do nothing: the servers keep running."""

    def submit(self, answers: Sequence[Response], keys: Sequence[int]) -> None:
        """Send complete requests of ``batch_size`` responses; the rest waits for more, or for ``finish``."""
        if not self._waiting and not self._requests:
            self.progress = ScoringProgress()
        self.progress.asked += len(answers)
        self._waiting += zip(keys, answers, strict=True)
        size = self._config.batch_size
        while len(self._waiting) >= size:
            self._send(size)

    def finish(self, keys: Sequence[int]) -> list[Score]:
        """Scores of ``keys``, in order. A response that no server scored has an error; others are not affected."""
        self._send(len(self._waiting))
        wanted = set(keys)
        try:
            for request in [request for request in self._requests if not wanted.isdisjoint(request[0])]:
                scores = request[1].result()
                self._requests.remove(request)
                self._scores |= zip(request[0], scores, strict=True)
                self.progress.add(scores)
        except BaseException:
            self._threads.clear()
            self._requests, self._scores = [], {}
            raise
        return [self._scores.pop(key) for key in keys]

    def score(self, answers: Sequence[Response]) -> list[Score]:
        self.submit(answers, range(len(answers)))
        return self.finish(range(len(answers)))

    def _send(self, n: int) -> None:
        """Send a request with the first ``n`` responses that wait; nothing for 0."""
        if n:
            keys, answers = zip(*self._waiting[:n], strict=True)
            self._requests.append((keys, self._threads.add(answers)))
            del self._waiting[:n]

    def _score(self, answers: Sequence[Response]) -> list[Score]:
        """Scores of the responses of one request."""
        try:
            body = json.dumps(openrlhf_protocol.to_request(answers)).encode()
        except (TypeError, ValueError) as error:
            # One ground truth that is not JSON must fail its own response only: send them one by one.
            if len(answers) > 1:
                return [score for answer in answers for score in self._score([answer])]
            return [Score(None, {}, f"the ground truth or extra_info cannot be sent as JSON: {error}")]
        config = self._config
        try:
            return with_retries(lambda: self._try_servers(body, len(answers)), retries=config.retries, backoff=config.backoff)
        except RequestRefused as error:
            return [
                Score(None, {}, f"no score from {self._key}: {error}", timed_out=error.late and config.batch_size == 1)
            ] * len(answers)

    def _try_servers(self, body: bytes, n: int) -> list[Score]:
        """Scores from the first server that returns them. Raises TransientError if one failed transiently, else Refused."""
        # Permanent failures move on to the next server too: one replica may have a bug or a wrong token that others do not.
        problems: list[TransientError | RequestRefused] = []
        for server in self._by_load():
            with self._lock:
                server.requests += 1
                server.in_flight += 1
            try:
                scores = self._request(server.url, body, n)
            except (TransientError, RequestRefused) as error:
                problems.append(error)
                self._failed(server, error)
            else:
                self._answered(server)
                return scores
        # Only transient failures are retried, so one server that may recover decides.
        raise next((error for error in problems if isinstance(error, TransientError)), problems[0])

    def _request(self, url: str, body: bytes, n: int) -> list[Score]:
        config, token = self._config, os.environ.get(self._config.token_env, "").strip()
        try:
            reply = post(url, body, token=token or None, timeout=config.timeout, timeout_key="reward.remote.timeout")
        except RequestRefused as error:
            unset = "" if token or not str(error).startswith("HTTP 401") else f" ({config.token_env} is not set here)"
            raise RequestRefused(f"{error}{unset}", late=error.late) from error
        try:
            return openrlhf_protocol.from_reply(reply, n)
        except ValueError as error:
            raise RequestRefused(hidden(f"{url}: {error}")) from error

    def _by_load(self) -> list[_Server]:
        """Servers in the order in which to try them: healthy first, then by requests in flight, then by total requests."""
        with self._lock:
            now = time.monotonic()
            return sorted(self._servers, key=lambda server: (server.retry_at > now, server.in_flight, server.requests))

    def _failed(self, server: _Server, error: Exception) -> None:
        with self._lock:
            server.in_flight -= 1
            server.failures += 1
            # The exponent is bounded too: after a long outage the product would overflow a float.
            backoff = min(LONGEST_PAUSE, self._config.backoff * 2 ** min(server.failures, 16))
            server.retry_at = time.monotonic() + backoff
            is_first = server.failures == 1
        if is_first:  # one line per outage, not one per request
            tell(f"note: reward server: {error}")

    def _answered(self, server: _Server) -> None:
        with self._lock:
            server.in_flight -= 1
            recovered, server.failures, server.retry_at = server.failures > 0, 0, 0.0
        if recovered:
            tell(f"note: reward server {server.url} responds again")


def open_rewards(config: RemoteScoringConfig) -> Rewards:
    """The configured rewards: servers if URLs are set, else local scoring processes. Starts nothing; raises as RewardRunner."""
    if config.remote_urls:
        return RemoteRewards(config.remote_urls, config.remote)
    return RewardRunner(config)


def needs_data_sources(config: RemoteScoringConfig) -> bool:
    """Whether data sources select the scorers in this process; for servers they are only a field of the request."""
    return not config.remote_urls and scores_by_source(config)
