"""The reward models of a run: each entry of reward.models over the defaults of reward.reward_model."""

import re
from dataclasses import asdict
from typing import Any

from configs.keys import ConfigError, merged
from configs.load import load
from configs.schema.ppo import ModelScoringConfig
from configs.schema.scoring_model import ScoringModelConfig
from configs.schema.serve_reward import ServedModelConfig

SHORT_FORM = "reward_model"
"""The name of the one that reward.reward_model.enable makes."""
NAME = re.compile(r"[A-Za-z]\w*")
TAKEN = ("acc", "score", "reward", "failed", "overlong", "overlong_reward")
"""Names that metrics have for other things."""


def reward_models(reward: ModelScoringConfig) -> dict[str, ScoringModelConfig]:
    """By name, the enabled short form first. Raises ConfigError with a line for each problem, under the key that was typed."""
    defaults: dict[str, Any] = asdict(reward.reward_model)
    enabled = defaults.pop("enable")
    short_form: dict[str, dict[str, Any]] = {SHORT_FORM: {}} if enabled else {}
    found: dict[str, ScoringModelConfig] = {}
    problems: list[str] = []
    for name, changes in (short_form | reward.models).items():
        key = model_key(name, reward)
        if enabled and name in reward.models and name == SHORT_FORM:
            problems.append(f"{key}: reward.reward_model.enable=true is a model of this name already; give another one")
            continue
        if NAME.fullmatch(name) is None or name in TAKEN:
            problems.append(f"{key}: a name is letters, digits and _, a letter first, and none of {', '.join(TAKEN)}")
            continue
        try:
            one = load(merged(defaults, changes), ScoringModelConfig).config
        except ConfigError as error:
            problems += [f"{key}.{line}" for line in str(error).splitlines()]
            continue
        if one.path is None and not one.urls:
            problems.append(f"{key}.path is null: name the model, or the servers that have it ({key}.urls)")
        elif one.path is not None and one.urls:
            problems.append(f"{key}.urls: the model is at {key}.path={one.path}, or on servers, not both; leave one out")
        found[name] = one
    if problems:
        raise ConfigError("\n".join(problems))
    return found


def served_model(model: ServedModelConfig) -> ScoringModelConfig:
    """The model that trainer.main_serve_reward serves, as one of a run."""
    return load(asdict(model) | {"urls": [], "weight": 1.0, "kind": "sequence", "clip": None}, ScoringModelConfig).config


def model_key(name: str, reward: ModelScoringConfig) -> str:
    """The dotted key of a model."""
    return f"reward.models.{name}" if name in reward.models else f"reward.{SHORT_FORM}"
