"""Reward model that runs on servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trainer.cluster.watchdog import Watchdog
from trainer.data.dataset import Prompt
from trainer.rewards.remote.remote_rewards import RemoteRewards
from trainer.rewards.requests import responses_to_score
from trainer.rewards.scoring import Score
from workers.batch import Batch


class ServedModel:
    """A Scorer (reward_models.py) backed by servers; their extra numbers are prefixed with the model's name."""

    def __init__(self, name: str, servers: RemoteRewards, tokenizer: PreTrainedTokenizerBase, watchdog: Watchdog) -> None:
        """tokenizer: the policy's tokenizer."""
        self.name = name
        self.servers = servers
        self.tokenizer = tokenizer
        self.watchdog = watchdog

    def score(self, answers: Batch, prompts: Sequence[Prompt], texts: Sequence[str]) -> tuple[list[Score], Tensor | None]:
        with self.watchdog.own("reward", f"scoring by reward model {self.name}", f"{len(answers)} answers"):
            scores = self.servers.score(responses_to_score(prompts, texts, answers, self.tokenizer, for_servers=True))
        return [
            replace(score, extra={f"{self.name}_{key}": value for key, value in score.extra.items()}) for score in scores
        ], None
