"""Generate and score responses to prompts of a data set, independent of the rollout engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from trainer.cluster.watchdog import Watchdog
from trainer.data.dataset import Prompt, PromptDataset
from trainer.data.files import value_of
from trainer.generation.shards import Row
from trainer.rewards.models.reward_models import RewardModels
from trainer.rewards.remote.remote_rewards import RemoteRewards
from trainer.rewards.requests import responses_to_score
from trainer.rewards.scoring import Rewards
from trainer.rollout.remote_rollout import RemoteRollout
from trainer.rollout.responses import join_responses, prompt_batch, texts_of
from workers.batch import Batch
from workers.rollout.base import Sampling
from workers.seeding import seed_of


class Generator:
    """Generates the rows of a shard."""

    def __init__(
        self,
        data: PromptDataset,
        rollout: RemoteRollout,
        tokenizer: PreTrainedTokenizerBase,
        rewards: Rewards | None,
        models: RewardModels | None,
        watchdog: Watchdog,
        *,
        prompt_key: str,
        n: int,
        sampling: Sampling,
        seed: int,
    ) -> None:
        """n: responses per prompt. rewards: None for no scores. models: additional reward models, None for none."""
        self.data = data
        self.rollout = rollout
        self.tokenizer = tokenizer
        self.rewards = rewards
        self.models = models
        self.watchdog = watchdog
        self.prompt_key = prompt_key
        self.n = n
        self.sampling = sampling
        self.seed = seed

    def rows(self, indices: Sequence[int]) -> list[Row]:
        """Rows with responses to the prompts ``indices``. Each response is seeded by (seed, uid, sample) alone."""
        prompts = [self.data[index] for index in indices]
        asked = [prompt for prompt in prompts for _ in range(self.n)]
        seeds = [seed_of(self.seed, "generation", prompt.uid, sample) for prompt in prompts for sample in range(self.n)]
        questions = prompt_batch(asked, seeds, greedy=torch.zeros(len(asked), dtype=torch.bool))
        answers = self.rollout.generate(questions, self.sampling, self.n)
        finished = answers.rows["finished"].bool().tolist()
        texts = texts_of(answers, self.tokenizer)
        columns: dict[str, list] = {
            "responses": texts,
            "log_probs": [values.double().sum().item() for values in answers.split_rows("rollout_log_probs")],
            "lengths": answers.lengths.tolist(),
            "finish_reasons": ["stop" if done else "length" for done in finished],
        }
        columns |= self._scores(asked, texts, join_responses(questions, answers))
        rows = []
        for place, (index, prompt) in enumerate(zip(indices, prompts, strict=True)):
            own = slice(place * self.n, (place + 1) * self.n)
            rows.append(self._of_data(index, prompt) | {name: values[own] for name, values in columns.items()})
        return rows

    def _scores(self, asked: Sequence[Prompt], texts: Sequence[str], answers: Batch) -> dict[str, list]:
        if self.rewards is None:
            return {}
        written = responses_to_score(asked, texts, answers, self.tokenizer, for_servers=isinstance(self.rewards, RemoteRewards))
        with self.watchdog.own("reward", "scoring", f"{len(written)} answers"):
            scores = self.rewards.score(written)
        parts = {}
        if self.models is not None:
            scores, _ = self.models.add(scores, answers, asked, texts, learn_from=None)
            # A colocated engine sleeps while the reward model works; it gets its weights again before the next shard.
            self.rollout.rest(self.models.group)
            parts = {"score_parts": [score.extra for score in scores]}
        return {"scores": [score.value for score in scores], "reward_errors": [score.error for score in scores], **parts}

    def _of_data(self, index: int, prompt: Prompt) -> Row:
        source = self.data.row(index)
        # Empty mappings are omitted: Parquet has no empty struct.
        kept = {name: source[name] for name in ("reward_model", "extra_info") if source.get(name)}
        named = {"data_source": prompt.data_source} if prompt.data_source else {}
        asked = value_of(source, self.prompt_key)
        return {"uid": prompt.uid, "prompt": asked, **named, **kept, "prompt_length": len(prompt.prompt_ids)}
