"""Target side of a translation: keys of a program of this repository, their types and defaults, and override syntax."""

import re
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, get_args, get_origin

import yaml

from configs.base.keys import CONFIG_DIR, ConfigError, bare_type, keys_of
from configs.schema.generation import GenerationConfig
from configs.schema.ppo import PPOConfig
from configs.schema.supervised import RewardModelConfig, SFTConfig

SCHEMAS: Mapping[str, type] = {
    "ppo_trainer": PPOConfig,
    "sft_trainer": SFTConfig,
    "reward_model_trainer": RewardModelConfig,
    "generation": GenerationConfig,
}
PLAIN = re.compile(r"[A-Za-z0-9_./~:@%+-]+")  # values that Hydra reads as a single word without quotes


class Ours:
    """Keys and defaults of a program of this repository, by its root YAML."""

    def __init__(self, root: str) -> None:
        self.keys = keys_of(SCHEMAS[root])
        self._defaults = _defaults(root)

    def is_default(self, key: str, value: Any) -> bool:
        """Whether ``value`` is the default of ``key``."""
        return key in self._defaults and _comparable(self._defaults[key]) == _comparable(value)

    def word(self, key: str, value: Any) -> str:
        """``key=value`` in Hydra's override syntax. Raises ConfigError if the value does not fit the key's type."""
        kind = bare_type(self.keys.leaves.get(key, Any))
        if get_origin(kind) is Annotated:
            kind = get_args(kind)[0]
        if isinstance(value, str) and kind in (int, float):
            value = _number(key, value, kind)
        return f"{key}={_written(value)}"


def _number(key: str, text: str, kind: type) -> str:
    """``text`` as a number of type ``kind``; an integer key accepts 1e8 as 100000000. Raises ConfigError."""
    try:
        found = float(text)
    except ValueError as error:
        raise ConfigError(f"{key}={text}: must be a number") from error
    if kind is float:
        return text
    if found != int(found):
        raise ConfigError(f"{key}={text}: must be a whole number")
    return str(int(found))


def _written(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(_written, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{name}:{_written(below)}' for name, below in value.items())}}}"
    text = str(value)
    if PLAIN.fullmatch(text):
        return text
    # Backslashes are doubled before a quote and at the end of the text, where Hydra reads them as escapes.
    escaped = re.sub(r"(\\*)('|\Z)", lambda end: end[1] * 2 + ("\\'" if end[2] else ""), text)
    return f"'{escaped}'"


def _comparable(value: Any) -> Any:
    """``value`` with numbers and texts of numbers converted to float, for comparison of YAML values and command-line words."""
    if isinstance(value, list):
        return [_comparable(item) for item in value]
    if isinstance(value, bool) or value is None:
        return value
    try:
        return float(value)
    except (TypeError, ValueError):
        return value


@cache
def _defaults(root: str) -> dict[str, Any]:
    """{dotted key: value} of a root YAML, interpolations unresolved."""
    found: dict[str, Any] = {}

    def walk(node: Mapping[str, Any], prefix: str) -> None:
        for name, value in node.items():
            found[f"{prefix}{name}"] = value
            if isinstance(value, dict):
                walk(value, f"{prefix}{name}.")

    walk(yaml.safe_load((CONFIG_DIR / f"{root}.yaml").read_text(encoding="utf-8")), "")
    return found
