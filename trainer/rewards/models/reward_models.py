"""Combine reward models with rule-based rewards: scores are normalised, clipped and summed with weights; models on servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from configs.schema.scoring_model import ScoringModelConfig
from trainer.algorithms.moments import RunningMoments
from trainer.cluster.watchdog import Watchdog
from trainer.data.dataset import Prompt
from trainer.rewards.remote.remote_rewards import RemoteRewards
from trainer.rewards.requests import responses_to_score
from trainer.rewards.scoring import Score
from workers.batch import Batch
from workers.controller.group import WorkerGroup

STATISTICS = "reward_statistics.json"
"""File of an exported reward model: mean and deviation of its scores."""


class Scorer(Protocol):
    """Interface of one reward model: raw scores of responses."""

    def score(self, answers: Batch, prompts: Sequence[Prompt], texts: Sequence[str]) -> tuple[list[Score], Tensor | None]:
        """One score per response, in order; for a model that scores tokens also the score of each token of ``answers``, (T,).

        answers: prompts and responses as the policy's tokens, B rows; tokens input_ids, response_mask; rows finished. prompts,
        texts: of each row. A failed score has an error and no value.
        """


@dataclass(frozen=True, slots=True)
class Moments:
    """Mean and standard deviation of a model's scores, stored when it was trained."""

    mean: float
    std: float


@dataclass(slots=True)
class RewardModel:
    """A reward model with its normalisation. moments: running (updated by training scores) or stored; None: no normalisation."""

    name: str
    config: ScoringModelConfig
    scorer: Scorer
    moments: RunningMoments | Moments | None

    def normalised(self, scores: Tensor) -> Tensor:
        """(scores - mean) / std, clamped to ``clip``: (N,) -> float64 (N,)."""
        scores = scores.double()
        if self.moments is not None:
            scores = (scores - self.moments.mean) / self.moments.std
        return scores if self.config.clip is None else scores.clamp(*self.config.clip)


class RewardModels:
    """All reward models of a run together with the rules."""

    def __init__(
        self, models: Sequence[RewardModel], *, rule_weight: float, asks_rules: bool, group: WorkerGroup | None = None
    ) -> None:
        """rule_weight: weight of the rule's score. asks_rules: whether a rule is configured. group: workers of local models."""
        self.models = models
        self.rule_weight = rule_weight
        self.asks_rules = asks_rules
        self.group = group

    def add(
        self,
        rules: Sequence[Score],
        answers: Batch,
        prompts: Sequence[Prompt],
        texts: Sequence[str],
        *,
        learn_from: Tensor | None,
    ) -> tuple[list[Score], Tensor | None]:
        """Add the models' scores to the rules' scores (B); see Scorer for the arguments.

        learn_from: bool (B,), responses that update running moments; None: validation.

        Returns scores and the part of their values that belongs to single tokens (T,), 0 elsewhere; None without a model that
        scores tokens. value: rule_weight * rule + sum of weight * normalised score; None, with the first error, if a part failed.
        extra: numbers of the rule, the raw score of each model under its name, and acc, the rule's score unless the rule reports
        acc itself. Raises ValueError if the reward function reports a number under the name of a model.
        """
        scores = [self._of_rule(score) for score in rules]
        at_tokens: Tensor | None = None
        for model in self.models:
            raw, by_token = model.scorer.score(answers, prompts, texts)
            if by_token is None:
                parts = self._normalised(model, raw, learn_from)
            else:
                by_token = model.normalised(by_token) * answers.tokens["response_mask"]
                parts = [float(part.sum()) for part in by_token.split(answers.lengths.tolist())]
                # The weight comes after the clip, which applies to normalised scores.
                weighed = model.config.weight * by_token
                at_tokens = weighed if at_tokens is None else at_tokens + weighed
            # Token scores were clipped one by one before they were summed: a single token must not outweigh the others.
            scores = [joined(so_far, model, own, part) for so_far, own, part in zip(scores, raw, parts, strict=True)]
        return scores, None if at_tokens is None else at_tokens.float()

    def _of_rule(self, score: Score) -> Score:
        if score.value is None:
            return score
        # Without a rule the score is 0, or the reward of an environment.
        extra = {"acc": score.value} | score.extra if self.asks_rules else score.extra
        return replace(score, value=self.rule_weight * score.value, extra=extra)

    def _normalised(self, model: RewardModel, raw: Sequence[Score], learn_from: Tensor | None) -> list[float]:
        """Normalised values, NaN for failed scores; updates running moments."""
        values = torch.tensor([torch.nan if score.value is None else score.value for score in raw], dtype=torch.float64)
        if isinstance(model.moments, RunningMoments):
            # Validation counts raw scores: moments that follow the policy would measure its lead over its own recent past, which
            # tends to 0 while the policy improves.
            if learn_from is None:
                return values.tolist()
            model.moments.update(values[learn_from])
        return model.normalised(values).tolist()

    def state(self) -> dict[str, Any]:
        """State of the running moments by model name."""
        return {name: moments.state() for name, moments in self._running().items()}

    def load(self, state: dict[str, Any]) -> None:
        for name, moments in self._running().items():
            moments.load(state[name])

    def _running(self) -> dict[str, RunningMoments]:
        return {model.name: model.moments for model in self.models if isinstance(model.moments, RunningMoments)}


def joined(so_far: Score, model: RewardModel, own: Score, part: float) -> Score:
    """Add a model's score to the sum so far. own: its raw score. part: its normalised value, before the weight."""
    if model.name in so_far.extra:
        raise ValueError(f"the reward function reports a number {model.name}, also the name of a reward model; rename one")
    if own.value is None:
        error = so_far.error or f"reward model {model.name}: {own.error}"
        return Score(None, so_far.extra | own.extra, error, so_far.timed_out or own.timed_out)
    extra = so_far.extra | {model.name: own.value} | own.extra
    if so_far.value is None:
        return replace(so_far, extra=extra)
    return replace(so_far, value=so_far.value + model.config.weight * part, extra=extra)


class ServedModel:
    """A Scorer backed by servers; their extra numbers are prefixed with the model's name."""

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
