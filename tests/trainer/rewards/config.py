"""Reward section of configs/ppo_trainer.yaml with changes."""

from dataclasses import replace
from functools import cache
from typing import Any

from configs.compose import compose
from configs.reward_models import reward_models
from configs.schema.ppo import PPOConfig, RewardConfig
from configs.schema.scoring_model import ScoringModelConfig


@cache
def _defaults() -> RewardConfig:
    return compose("ppo_trainer", PPOConfig).reward


def reward_config(**changes: Any) -> RewardConfig:
    """Reward configuration; a dict changes keys inside the section of that name."""
    defaults = _defaults()
    sections = {"custom_reward_function", "gsm8k", "math_dapo", "code", "judge", "remote"} & changes.keys()
    inner = {
        "custom_reward_function": defaults.custom_reward_function,
        "gsm8k": defaults.gsm8k,
        "math_dapo": defaults.math_dapo,
        "code": defaults.code,
        "judge": defaults.judge,
        "remote": defaults.remote,
    }
    return replace(defaults, **changes | {name: replace(inner[name], **changes[name]) for name in sections})  # type: ignore[type-var]


@cache
def _model() -> ScoringModelConfig:
    return reward_models(compose("ppo_trainer", PPOConfig, ["reward.models.a.path=x"]).reward)["a"]


def scoring_model(**changes: Any) -> ScoringModelConfig:
    """Default configuration of a reward model with ``changes``."""
    return replace(_model(), **changes)
