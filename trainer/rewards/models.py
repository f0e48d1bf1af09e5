"""Reward models beside the rules: scores of each, normalised, clipped, and added up by weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from configs.schema.scoring_model import ScoringModelConfig
from trainer.algorithms.moments import RunningMoments
from trainer.data.dataset import Prompt
from trainer.rewards.scoring import Score
from workers.batch import Batch
from workers.controller.group import WorkerGroup


class Scorer(Protocol):
    """Gives answers the raw scores of one model."""

    def score(self, answers: Batch, prompts: Sequence[Prompt], texts: Sequence[str]) -> tuple[list[Score], Tensor | None]:
        """One score an answer, in order, and of a model that scores tokens what each token of ``answers`` gets, (T,).

        answers: prompt and answer as the policy's tokens, B rows; tokens input_ids, response_mask; rows finished. prompts, texts:
        of each row. A score that could not be had says why, and bears no value.
        """


@dataclass(frozen=True, slots=True)
class Moments:
    """Of the scores that a model gave when it was made."""

    mean: float
    std: float


@dataclass(slots=True)
class RewardModel:
    """moments: of its scores, what they are normalised by; running ones take in what training sees. None: they are not."""

    name: str
    config: ScoringModelConfig
    scorer: Scorer
    moments: RunningMoments | Moments | None

    def normalised(self, scores: Tensor) -> Tensor:
        """(N,) -> float64 (N,): less the mean, over the deviation, then into the range of ``clip``."""
        scores = scores.double()
        if self.moments is not None:
            scores = (scores - self.moments.mean) / self.moments.std
        return scores if self.config.clip is None else scores.clamp(*self.config.clip)


class RewardModels:
    """All of a run, and the rules."""

    def __init__(
        self, models: Sequence[RewardModel], *, rule_weight: float, asks_rules: bool, group: WorkerGroup | None = None
    ) -> None:
        """rule_weight: of the rules' score in the sum; asks_rules: they were asked for one. group: where the models work."""
        self.models = models
        self.rule_weight = rule_weight
        self.asks_rules = asks_rules
        self.group = group

    def add(
        self, rules: Sequence[Score], answers: Batch, prompts: Sequence[Prompt], texts: Sequence[str], *, learn_from: Tensor
    ) -> tuple[list[Score], Tensor | None]:
        """The rules' scores (B) with those of the models; see Scorer. learn_from: bool (B,), answers that running moments see.
        Without any it is a measurement, and scores of models with running moments count raw: normalised by moments that follow
        the policy, they would say how far it is ahead of its own past, and fall towards 0 while it improves.

        value: rule_weight * rule + sum of weight * normalised score; None, with the first error, where a part failed. extra: what
        the rule told, the raw score of each model under its name, and as acc that of the rule, unless it told one.
        The tensor: what of the values lies at single tokens (T,), 0 elsewhere; None without a model that scores tokens.
        Raises ValueError where the reward function tells a number under the name of a model.
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
                weighed = model.config.weight * by_token
                at_tokens = weighed if at_tokens is None else at_tokens + weighed
            scores = [joined(so_far, model, own, part) for so_far, own, part in zip(scores, raw, parts, strict=True)]
        return scores, None if at_tokens is None else at_tokens.float()

    def _of_rule(self, score: Score) -> Score:
        if score.value is None or not self.asks_rules:
            return score
        return replace(score, value=self.rule_weight * score.value, extra={"acc": score.value} | score.extra)

    def _normalised(self, model: RewardModel, raw: Sequence[Score], learn_from: Tensor) -> list[float]:
        """NaN where there is no score."""
        values = torch.tensor([torch.nan if score.value is None else score.value for score in raw], dtype=torch.float64)
        if isinstance(model.moments, RunningMoments):
            if not learn_from.any():
                return values.tolist()
            model.moments.see(values[learn_from])
        return model.normalised(values).tolist()

    def state(self) -> dict[str, Any]:
        """Of running moments, by the models' names."""
        return {name: moments.state() for name, moments in self._running().items()}

    def load(self, state: dict[str, Any]) -> None:
        for name, moments in self._running().items():
            moments.load(state[name])

    def _running(self) -> dict[str, RunningMoments]:
        return {model.name: model.moments for model in self.models if isinstance(model.moments, RunningMoments)}


def joined(so_far: Score, model: RewardModel, own: Score, part: float) -> Score:
    """so_far: of the rules and the models before this one. own: its raw score. part: of it, what is weighed."""
    if model.name in so_far.extra:
        raise ValueError(f"the reward function tells a number {model.name}, and a reward model has this name; give it another")
    if own.value is None:
        error = so_far.error or f"reward model {model.name}: {own.error}"
        return Score(None, so_far.extra | own.extra, error, so_far.timed_out or own.timed_out)
    extra = so_far.extra | {model.name: own.value} | own.extra
    if so_far.value is None:
        return replace(so_far, extra=extra)
    return replace(so_far, value=so_far.value + model.config.weight * part, extra=extra)
