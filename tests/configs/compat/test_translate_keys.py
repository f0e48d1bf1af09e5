"""Every key of verl's main_ppo is known, ignored or translated with a note, or refused with a remedy."""

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from configs.argv import normalise
from configs.base.keys import ConfigError, keys_of
from configs.compat.translate import as_typed, compat
from configs.compose import compose
from configs.schema.ppo import PPOConfig

FOLLOWS, WANTED = "~", "???"  # in the list: the default is another key's; the key must be given
OFTEN = 10


@dataclass(frozen=True)
class Row:
    """A key of verl. default: as on a command line. count: command lines in verl's examples that set the key."""

    key: str
    default: str
    count: int


def rows() -> list[Row]:
    found = []
    for line in Path(__file__).with_name("verl_keys.tsv").read_text().splitlines():
        if not line.startswith("#"):
            key, default, *count = line.split("\t")
            found.append(Row(key, _typed(default), int(count[0]) if count else 0))
    return found


def _typed(default: str) -> str:
    try:
        value: Any = ast.literal_eval(default)
    except (SyntaxError, ValueError):
        value = default
    text = str(value).replace(": None", ": null") if isinstance(value, dict) else as_typed(value)
    return f"'{text}'" if text == "" or text.startswith("~/") else text


ROWS = rows()
WITH_DEFAULT = [row for row in ROWS if row.default not in (FOLLOWS, WANTED)]


def test_list_of_keys_is_complete() -> None:
    """104 keys are set ten times or more."""
    assert len(ROWS) == 1010 and len({row.key for row in ROWS}) == 1010
    assert sum(row.count >= OFTEN for row in ROWS) == 104


def test_all_keys_at_verls_defaults_compose_together() -> None:
    config = compose("ppo_trainer", PPOConfig, [f"{row.key}={row.default}" for row in WITH_DEFAULT])
    assert len(WITH_DEFAULT) > 800
    assert config.data.max_prompt_length == 512 and config.critic.fsdp_config.model_dtype == "float32"


def test_frequent_keys_are_not_refused_at_their_defaults() -> None:
    keys = keys_of(PPOConfig)
    for row in ROWS:
        name = compat().rename(row.key, keys)
        if row.count >= OFTEN and not keys.knows(name):
            default = "null" if row.default == FOLLOWS else row.default
            (note,) = normalise([f"{row.key}={default}"], PPOConfig, "ppo_trainer").notes
            assert note.startswith(name) and ": " in note


def test_every_key_with_another_value_passes_or_is_refused_with_a_remedy() -> None:
    """One line for each refused key, and never «no such key»."""
    with pytest.raises(ConfigError) as caught:
        normalise([f"{row.key}=surely_another" for row in ROWS], PPOConfig, "ppo_trainer")
    lines = str(caught.value).splitlines()
    assert len(lines) > 80
    for line in lines:
        key, _, advice = line.partition(": ")
        assert "no such key" not in line and len(advice.split()) >= 3, line
        assert compat().rename(key.partition("=")[0], keys_of(PPOConfig)) == key.partition("=")[0]


def test_a_key_of_neither_system_is_unknown() -> None:
    with pytest.raises(ConfigError, match="there is no such key"):
        normalise(["actor_rollout_ref.actor.surely_not=1"], PPOConfig, "ppo_trainer")


def test_null_is_translated_to_the_default_of_the_key() -> None:
    config = compose("ppo_trainer", PPOConfig, ["critic.optim.lr_warmup_steps=null", "reward.custom_reward_function.name=null"])
    assert config.critic.optim.lr_warmup_steps == -1
    assert config.reward.custom_reward_function.name == "compute_score"
