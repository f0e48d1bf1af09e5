"""Reward servers: in this process, with HTTP in one thread and the scorer in another, or as the program itself."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread

from configs.compose import compose
from configs.schema.serve_reward import ServeRewardConfig
from tests.layout.source import ROOT
from trainer.cluster.watchdog import Watchdog
from trainer.rewards.pool.runner import RewardRunner
from trainer.serving.listener import Listener, bound
from trainer.serving.request_queue import RequestQueue
from trainer.serving.reward_server import ScoreAll, app_of, model, score_queued


def serve_config(*overrides: str) -> ServeRewardConfig:
    fixed = ("server.port=0", "reward.num_workers=0", "trainer.device=cpu", "model.fsdp_config.dtype=float32")
    return compose("serve_reward", ServeRewardConfig, [*fixed, *overrides])


@contextmanager
def serving(*overrides: str, score: ScoreAll | None = None) -> Iterator[str]:
    """The address of the server. score: replaces the configured scorer."""
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        config = serve_config(f"trainer.default_local_dir={folder}", *overrides)
        queue, stopped = RequestQueue(config.server.batch_size), Event()
        if config.model.path is not None:
            score = model(config, Watchdog(asdict(config.timeouts), Path(folder)), stack)
        elif score is None:
            rewards = RewardRunner(config.reward)
            rewards.start()
            score = rewards.score
        scoring = Thread(target=score_queued, args=(queue, score, lambda: not stopped.is_set()), daemon=True)
        place = stack.enter_context(bound(config.server))
        listener = stack.enter_context(Listener(place, app_of(config, queue.scores), config.server))
        scoring.start()
        yield f"{listener.url}/get_reward"
        stopped.set()
        scoring.join()


@contextmanager
def program(*overrides: str) -> Iterator[subprocess.Popen[str]]:
    """python -m trainer.main_serve_reward; ``address`` waits until it is ready."""
    fixed = ("server.port=0", "trainer.device=cpu", "model.fsdp_config.dtype=float32")
    command = [sys.executable, "-m", "trainer.main_serve_reward", *fixed, *overrides]
    heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell makes its background processes ignore it
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, preexec_fn=heeds, **pipes) as started:
        try:
            yield started
        finally:
            started.kill()


def address(started: subprocess.Popen[str]) -> str:
    assert started.stdout is not None
    line = started.stdout.readline()
    match = re.fullmatch(r"serving \S+ at (http://127\.0\.0\.1:\d+/get_reward) \(process (\d+)\)\n", line)
    assert match and int(match[2]) == started.pid, line
    return match[1]
