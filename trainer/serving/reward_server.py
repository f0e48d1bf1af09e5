"""Run a reward server: the scorer in the main thread, HTTP in a second thread.

The main thread starts and calls the scorer, because time limits and signals are handled there (Watchdog.own) and its child
processes end with it. The HTTP thread parses requests and queues them; concurrent requests are scored in one batch. A judge is
a model server behind this interface: its requests enter the engines as they come.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from configs.schema.serve_reward import ServeRewardConfig
from trainer.cluster.watchdog import Watchdog
from trainer.rewards.pool.runner import RewardRunner
from trainer.rewards.rules.reward_registry import check_data_sources, scores_by_source
from trainer.rewards.scoring import Response, Score
from trainer.serving.listener import Listener, bound, check_installed
from trainer.serving.request_queue import RequestQueue
from workers.controller.stop import graceful_stop

if TYPE_CHECKING:
    from fastapi import FastAPI

    from trainer.serving.app import Scores

ScoreAll = Callable[[Sequence[Response]], list[Score]]

_POLL_SECONDS = 0.2  # seconds between checks that the HTTP thread is alive


def run(config: ServeRewardConfig) -> None:
    """Serve until a signal arrives. Raises ValueError for user errors, before the server listens."""
    check_installed()
    with graceful_stop(), ExitStack() as stack:
        # Bind first: an occupied port is reported before a model is loaded. The socket listens only once the scorer is ready.
        place = stack.enter_context(bound(config.server))
        scores, work = start(config, stack)
        listener = stack.enter_context(Listener(place, app_of(config, scores), config.server))
        print(f"serving {name_of(config)} at {listener.url}/get_reward (process {os.getpid()})", flush=True)
        work(listener.is_alive)
        raise RuntimeError("the listener has ended")


def start(config: ServeRewardConfig, stack: ExitStack) -> tuple[Scores, Callable[[Callable[[], bool]], None]]:
    """Start the scorer, which ends with ``stack``. Returns what the HTTP thread awaits, and the main thread's loop."""
    watchdog = Watchdog(asdict(config.timeouts), Path(config.trainer.default_local_dir))
    if config.judge_engine.enable:
        from trainer.serving.engine_judge import start_judge  # loads torch, which rules do without

        judge = start_judge(config, watchdog, stack)
        return judge.scores, judge.engine.work
    queue = RequestQueue(config.server.batch_size)
    score = (rules if config.model.path is None else model)(config, watchdog, stack)
    return queue.scores, partial(score_queued, queue, score)


def rules(config: ServeRewardConfig, watchdog: Watchdog, stack: ExitStack) -> ScoreAll:
    """Start rule-based scoring processes, which end with ``stack``."""
    runner = stack.enter_context(RewardRunner(config.reward))
    runner.wait_ready()

    def score(answers: Sequence[Response]) -> list[Score]:
        with watchdog.own("reward", "scoring", f"{len(answers)} answers"):
            return runner.score(answers)

    return score


def model(config: ServeRewardConfig, watchdog: Watchdog, stack: ExitStack) -> ScoreAll:
    """Start a reward model on workers, which end with ``stack``."""
    from trainer.cluster.launch import opened_workers  # load torch, which rules do without
    from trainer.serving.served_scorer import check_model, start_scorer

    check_model(config)
    return start_scorer(config, stack.enter_context(opened_workers(config)), watchdog).score


def score_queued(queue: RequestQueue, score: ScoreAll, is_running: Callable[[], bool]) -> None:
    """Score queued requests in batches until ``is_running`` is false; requests left at the end fail with ServerStopping."""
    taken = []
    try:
        while is_running():
            # Without those whose client has gone; from here on a request is not cancelled any more.
            taken = [waiting for waiting in queue.take(_POLL_SECONDS) if waiting.scores.set_running_or_notify_cancel()]
            scores = score([answer for waiting in taken for answer in waiting.answers]) if taken else []
            for waiting in taken:
                # Scores are flat, in the order of the requests: each request takes its share from the front.
                own, scores = scores[: len(waiting.answers)], scores[len(waiting.answers) :]
                waiting.scores.set_result(own)
    finally:
        queue.close(taken)


class RequestCounter:
    """Counters of requests and responses; prints a line to stderr every ``log_every`` requests."""

    def __init__(self, log_every: int) -> None:
        self._log_every = log_every
        self._since = time.monotonic()
        self._before = 0
        self.counts = {"requests": 0, "answers": 0, "failed": 0}

    def add(self, scores: Sequence[Score]) -> None:
        self.counts["requests"] += 1
        self.counts["answers"] += len(scores)
        self.counts["failed"] += sum(score.value is None for score in scores)
        if self.counts["requests"] % self._log_every == 0:
            speed = (self.counts["answers"] - self._before) / (time.monotonic() - self._since)
            words = f"{self.counts['requests']:,} requests, {self.counts['answers']:,} answers, {self.counts['failed']:,} failed"
            print(f"reward server: {words}, {speed:,.1f} answers/s", file=sys.stderr, flush=True)
            self._since, self._before = time.monotonic(), self.counts["answers"]


def app_of(config: ServeRewardConfig, scores: Scores) -> FastAPI:
    """HTTP of the reward server."""
    from trainer.serving.app import reward_app

    server, counter = config.server, RequestCounter(config.server.log_every)

    async def counted(answers: Sequence[Response]) -> list[Score]:
        found = await scores(answers)
        counter.add(found)
        return found

    return reward_app(
        counted,
        token=server.token,
        most_bytes=int(server.max_request_mb * (1 << 20)),
        check=lambda answers: check_answers(config, answers),
        health=lambda: {"serves": name_of(config)} | counter.counts,
    )


def check_answers(config: ServeRewardConfig, answers: Sequence[Response]) -> None:
    """Raises ValueError for a data source without a scorer, before the request is queued."""
    # In the HTTP thread: within a batch the error would fail the requests of other clients too.
    if config.model.path is None and not config.judge_engine.enable and scores_by_source(config.reward):
        check_data_sources(answer.data_source for answer in answers)


def name_of(config: ServeRewardConfig) -> str:
    """Name of the served scorer, for logs and GET /health."""
    reward, custom = config.reward, config.reward.custom_reward_function
    return (
        (f"{config.judge_engine.model.path} as a judge" if config.judge_engine.enable else config.model.path)
        or reward.scorer
        or (f"{custom.path}:{custom.name}" if custom.path is not None else "the data sources' scorers")
    )
