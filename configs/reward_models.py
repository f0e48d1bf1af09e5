"""Reward models of a run: the entries of reward.models merged over the defaults of reward.reward_model."""

import re
from dataclasses import asdict
from typing import Any

from configs.base.keys import ConfigError, merged
from configs.load import load
from configs.schema.ppo import ModelScoringConfig
from configs.schema.scoring_model import ScoringModelConfig
from configs.schema.serve_reward import ServedModelConfig

SHORT_FORM = "reward_model"
"""Name of the reward model that reward.reward_model.enable=true defines."""
NAME = re.compile(r"[A-Za-z]\w*")
TAKEN = ("acc", "score", "reward", "failed", "overlong", "overlong_reward")
"""Reserved names, used by other metrics."""


def reward_models(reward: ModelScoringConfig) -> dict[str, ScoringModelConfig]:
    """{name: configuration}, the enabled short form first. Raises ConfigError with one line per problem, under the user's key."""
    defaults: dict[str, Any] = asdict(reward.reward_model)
    enabled = defaults.pop("enable")
    short_form: dict[str, dict[str, Any]] = {SHORT_FORM: {}} if enabled else {}
    found: dict[str, ScoringModelConfig] = {}
    problems: list[str] = []
    for name, changes in (short_form | reward.models).items():
        key = model_key(name, reward)
        if enabled and name in reward.models and name == SHORT_FORM:
            problems.append(f"{key}: reward.reward_model.enable=true already defines a model with this name; use another one")
            continue
        if NAME.fullmatch(name) is None or name in TAKEN:
            problems.append(
                f"{key}: names consist of letters, digits and _, start with a letter, and must not be one of {', '.join(TAKEN)}"
            )
            continue
        try:
            one = load(merged(defaults, changes), ScoringModelConfig).config
        except ConfigError as error:
            # Keys in these messages are relative to the model; prefix them with the key in the user's configuration.
            problems += [f"{key}.{line}" for line in str(error).splitlines()]
            continue
        if one.path is None and not one.urls:
            problems.append(f"{key}.path is null: set the model, or the servers that host it ({key}.urls)")
        elif one.path is not None and one.urls:
            problems.append(
                f"{key}.urls: conflicts with {key}.path={one.path}: a model is either local or on servers; remove one of the keys"
            )
        found[name] = one
    if problems:
        raise ConfigError("\n".join(problems))
    return found


def served_model(model: ServedModelConfig) -> ScoringModelConfig:
    """Model of trainer.main_serve_reward in the form of a run's reward model."""
    return load(asdict(model) | {"urls": [], "weight": 1.0, "kind": "sequence", "clip": None}, ScoringModelConfig).config


def model_key(name: str, reward: ModelScoringConfig) -> str:
    """Dotted key of a reward model."""
    return f"reward.models.{name}" if name in reward.models else f"reward.{SHORT_FORM}"
