"""Scores that servers give, ``reward.remote_urls``: several requests at a time, each to whichever server is well."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from types import TracebackType

from configs.schema.ppo import RemoteConfig, RemoteScoringConfig
from configs.secret_names import hidden
from trainer.rewards import wire
from trainer.rewards.http import Passing, Refused, nobody_there, patiently, post
from trainer.rewards.registry import scores_by_source
from trainer.rewards.runner import RewardRunner
from trainer.rewards.scoring import Answer, Progress, Rewards, Score, in_threads
from workers.controller.logs import tell

_LONGEST_REST = 60.0  # seconds until a server that does not answer is asked first again
_BETWEEN_LOOKS = 0.1  # seconds, while no server is there yet


@dataclass(slots=True)
class _Server:
    """asked: requests so far; in_flight: those not answered yet. failures: in a row; until rests_until it is asked last."""

    url: str
    asked: int = 0
    in_flight: int = 0
    failures: int = 0
    rests_until: float = 0.0


class RemoteRewards:
    """Stands where a RewardRunner does. The servers of ``urls`` are copies of one: each request goes to one of them."""

    def __init__(self, urls: Sequence[str], config: RemoteConfig, key: str = "reward.remote_urls") -> None:
        """Asks nothing yet. key: where the user names them."""
        self._config = config
        self._key = key
        self._servers = [_Server(url) for url in urls]
        self._lock = Lock()
        self.progress = Progress()

    def start(self) -> None:
        """The servers are started by others."""

    def wait_ready(self) -> None:
        """Until one of the servers takes connections: it may still be loading. Raises ValueError if none does in the time that a
        request may take."""
        patience = time.monotonic() + self._config.timeout
        while True:
            problems = [nobody_there(server.url, self._config.timeout) for server in self._servers]
            if None in problems:
                return
            if time.monotonic() >= patience:
                raise ValueError(f"{self._key}: no server takes a connection: {problems[0]}")
            time.sleep(_BETWEEN_LOOKS)

    def __enter__(self) -> RemoteRewards:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """They go on."""

    def score(self, answers: Sequence[Answer]) -> list[Score]:
        """One score an answer, in order. Where no server gives one, its error says why; the others have theirs."""
        size = self._config.batch_size
        batches = [answers[start : start + size] for start in range(0, len(answers), size)]
        self.progress = Progress(len(answers))
        found: list[Score] = []
        for scores in in_threads(self._score, batches, self._config.concurrency):
            found += scores
            self.progress.add(scores)
        return found

    def _score(self, answers: Sequence[Answer]) -> list[Score]:
        """Of one request."""
        try:
            body = json.dumps(wire.to_request(answers)).encode()
        except (TypeError, ValueError) as error:
            if len(answers) > 1:  # it fails the answer that it is about
                return [score for answer in answers for score in self._score([answer])]
            return [Score(None, {}, f"the ground truth or extra_info cannot be sent as JSON: {error}")]
        config = self._config
        try:
            return patiently(lambda: self._ask(body, len(answers)), retries=config.retries, backoff=config.backoff)
        except Refused as error:
            return [Score(None, {}, f"no score from {self._key}: {error}", timed_out=error.late)] * len(answers)

    def _ask(self, body: bytes, n: int) -> list[Score]:
        """The scores by the first server that gives them. Raises Passing if one of them may do so later, else Refused."""
        problems: list[Passing | Refused] = []
        for server in self._by_ease():
            with self._lock:
                server.asked += 1
                server.in_flight += 1
            try:
                scores = self._request(server.url, body, n)
            except (Passing, Refused) as error:
                problems.append(error)
                self._failed(server, error)
            else:
                self._answered(server)
                return scores
        raise next((error for error in problems if isinstance(error, Passing)), problems[0])

    def _request(self, url: str, body: bytes, n: int) -> list[Score]:
        config, token = self._config, os.environ.get(self._config.token_env, "").strip()
        try:
            reply = post(url, body, token=token or None, timeout=config.timeout, timeout_key="reward.remote.timeout")
        except Refused as error:
            unset = "" if token or not str(error).startswith("HTTP 401") else f" ({config.token_env} is not set here)"
            raise Refused(f"{error}{unset}", late=error.late) from error
        try:
            return wire.from_reply(reply, n)
        except ValueError as error:
            raise Refused(hidden(f"{url}: {error}")) from error

    def _by_ease(self) -> list[_Server]:
        """Those that are well first, of them the one with the least to do."""
        with self._lock:
            now = time.monotonic()
            return sorted(self._servers, key=lambda server: (server.rests_until > now, server.in_flight, server.asked))

    def _failed(self, server: _Server, error: Exception) -> None:
        with self._lock:
            server.in_flight -= 1
            server.failures += 1
            rest = min(_LONGEST_REST, self._config.backoff * 2 ** min(server.failures, 16))
            server.rests_until = time.monotonic() + rest
            is_news = server.failures == 1
        if is_news:
            tell(f"note: reward server: {error}")

    def _answered(self, server: _Server) -> None:
        with self._lock:
            server.in_flight -= 1
            is_news, server.failures, server.rests_until = server.failures > 0, 0, 0.0
        if is_news:
            tell(f"note: reward server {server.url} answers again")


def open_rewards(config: RemoteScoringConfig) -> Rewards:
    """What gives scores: servers, or else scoring processes of our own. Starts nothing; errors are those of RewardRunner."""
    if config.remote_urls:
        return RemoteRewards(config.remote_urls, config.remote)
    return RewardRunner(config)


def needs_data_sources(config: RemoteScoringConfig) -> bool:
    """Whether the data sources choose the scorers here; to servers they are only told."""
    return not config.remote_urls and scores_by_source(config)
