"""A reward server in this process: HTTP in a thread, and the scorer in another."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Event, Thread

from configs.compose import compose
from configs.schema.serve_reward import ServeRewardConfig
from trainer.rewards.runner import RewardRunner
from trainer.rewards.scoring import Answer, Score
from trainer.serving.assemble import Count, Listener, bound, work
from trainer.serving.desk import Desk


def serve_config(*overrides: str) -> ServeRewardConfig:
    return compose("serve_reward", ServeRewardConfig, ["server.port=0", "reward.num_workers=0", *overrides])


@contextmanager
def serving(*overrides: str, score: Callable[[Sequence[Answer]], list[Score]] | None = None) -> Iterator[str]:
    """Its address. score: instead of what the configuration says."""
    config = serve_config(*overrides)
    desk, count, stopped = Desk(config.server.batch_size), Count(config.server.log_every), Event()
    rewards = RewardRunner(config.reward)
    rewards.start()
    words = (desk, score or rewards.score, count)
    scoring = Thread(target=work, args=words, kwargs={"goes_on": lambda: not stopped.is_set()}, daemon=True)
    with bound(config.server) as place, Listener(place, desk, config, count) as listener:
        scoring.start()
        yield listener.url
        stopped.set()
        scoring.join()
