"""A reward server in this process: HTTP in a thread, and the scorer in another."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread

from configs.compose import compose
from configs.schema.serve_reward import ServeRewardConfig
from trainer.rewards.runner import RewardRunner
from trainer.serving.assemble import Count, Listener, ScoreAll, bound, model, work
from trainer.serving.desk import Desk
from trainer.watchdog import Watchdog


def serve_config(*overrides: str) -> ServeRewardConfig:
    fixed = ("server.port=0", "reward.num_workers=0", "trainer.device=cpu", "model.fsdp_config.dtype=float32")
    return compose("serve_reward", ServeRewardConfig, [*fixed, *overrides])


@contextmanager
def serving(*overrides: str, score: ScoreAll | None = None) -> Iterator[str]:
    """Its address. score: instead of what the configuration says."""
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        config = serve_config(f"trainer.default_local_dir={folder}", *overrides)
        desk, count, stopped = Desk(config.server.batch_size), Count(config.server.log_every), Event()
        if config.model.path is not None:
            score = model(config, Watchdog(asdict(config.timeouts), Path(folder)), stack)
        elif score is None:
            rewards = RewardRunner(config.reward)
            rewards.start()
            score = rewards.score
        words = {"goes_on": lambda: not stopped.is_set()}
        scoring = Thread(target=work, args=(desk, score, count), kwargs=words, daemon=True)
        listener = stack.enter_context(Listener(stack.enter_context(bound(config.server)), desk, config, count))
        scoring.start()
        yield listener.url
        stopped.set()
        scoring.join()
