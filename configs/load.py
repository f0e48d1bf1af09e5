"""Conversion of a composed tree to a typed, frozen configuration. No other module receives a DictConfig.

Every problem is one line with the key, its value, what is allowed, and the most similar name.
"""

import json
import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from configs.argv import normalise_tree
from configs.base.keys import CONFIG_DIR, ConfigError, Keys, bare_type, did_you_mean, filled, followed, keys_of, takes_null
from configs.clamp import within_bounds
from configs.compat.translate import compat
from configs.required import without_marks
from configs.schema.ppo import PPOConfig
from configs.schema.supervised import SFTConfig

Config = TypeVar("Config")
TOO_MANY_MISSING = 10
WORDS = {  # pydantic error types: clearer messages than pydantic's
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "dict_type": "must have keys below it",
    "dataclass_type": "must have keys below it",
}


@dataclass(frozen=True, slots=True)
class Loaded(Generic[Config]):
    """A configuration and its warnings (notes), about keys that were left out or clamped."""

    config: Config
    notes: tuple[str, ...]


def load_ppo(tree: Mapping[str, Any]) -> PPOConfig:
    """The PPO configuration of a tree, without its warnings."""
    return load(tree, PPOConfig).config


def ppo_config(nodes: tuple[str, ...] = (), changes: Mapping[str, Any] | None = None) -> PPOConfig:
    """configs/ppo_trainer.yaml with ``changes``, validated like a user's configuration.

    changes: values of leaves directly below one of ``nodes``, by the last part of their keys. Raises ValueError.
    """
    if not changes:
        return _ppo_defaults()
    known = {key.rpartition(".")[2]: key for key in keys_of(PPOConfig).leaves if key.rpartition(".")[0] in nodes}
    unknown = sorted(changes.keys() - known.keys())
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: unknown option; known: {', '.join(sorted(known))}")
    tree = _ppo_tree().copy()
    for name, value in changes.items():
        OmegaConf.update(tree, known[name], value)
    return load_ppo(tree)


@cache
def _ppo_defaults() -> PPOConfig:
    return load_ppo(_ppo_tree())


@cache
def _ppo_tree() -> DictConfig:
    """The root YAML without Hydra: configuration groups set nothing unless they are selected."""
    tree = OmegaConf.load(CONFIG_DIR / "ppo_trainer.yaml")
    assert isinstance(tree, DictConfig)
    del tree["defaults"]  # Hydra's defaults list, not a key of the schema
    return tree


def load_sft(tree: Mapping[str, Any]) -> SFTConfig:
    """The SFT configuration of a tree, without its warnings."""
    return load(tree, SFTConfig).config


def load(
    tree: Mapping[str, Any], schema: type[Config], typed: Collection[str] = (), typed_foreign: Collection[str] = ()
) -> Loaded[Config]:
    """Validate a tree against a schema and convert it.

    typed, typed_foreign: keys on the command line, see normalise_tree. Raises ConfigError with one line for each problem.
    """
    # Normalize before interpolations are resolved: translated keys may set values that others refer to.
    unresolved: Any = OmegaConf.to_container(tree) if isinstance(tree, DictConfig) else tree
    native, notes = normalise_tree(unresolved, schema, typed, typed_foreign)
    try:
        plain: Any = OmegaConf.to_container(OmegaConf.create(without_marks(native, schema)), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}; refer to an existing key") from error
    keys = keys_of(schema)
    notes += _take_engine_arguments(plain)
    converted = _convert(filled(plain, schema), keys.leaves, "")
    # JSON, which the validation below uses, cannot represent NaN and infinity; no key has a use for them.
    infinite = [f"{key}={value}: must be a finite number" for key, value in _floats(converted, "") if not math.isfinite(value)]
    if infinite:
        raise ConfigError("\n".join(infinite))
    try:
        # Validate as JSON: in strict mode pydantic then still rejects "1" for 1, but accepts mappings for dataclasses and lists
        # for tuples, which strict validation of Python objects does not.
        config: Config = _adapter(schema).validate_json(json.dumps(converted), strict=True)  # type: ignore[arg-type]  # hashable
    except ValidationError as error:
        raise ConfigError("\n".join(_problems(error, keys))) from error
    config, cut = within_bounds(config, typed)
    return Loaded(config, (*notes, *cut))


def check_swept(overrides: Sequence[str], schema: type) -> None:
    """Check the values of a sweep. Raises ConfigError, one line for each that its key does not take.

    Otherwise the job that has it would find it, when the jobs before it have ended. Of lists, mappings, intervals and what refers
    to other keys the job checks the values.
    """
    keys, problems = keys_of(schema), list[str]()
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException:
        return  # which the composition reports
    for override in parsed:
        key, sweep = override.key_or_group, override.value()
        if not isinstance(sweep, ChoiceSweep) or key not in keys.leaves:
            continue
        texts = [element.text if isinstance(element, QuotedString) else element for element in sweep.list]
        for value in texts:
            if isinstance(value, list | dict) or "${" in str(value):
                continue
            converted = _convert({key: value}, keys.leaves, "")[key]
            try:
                _adapter(keys.leaves[key]).validate_json(json.dumps(converted), strict=True)
            except ValidationError as error:
                place = tuple(key.split("."))
                problems += [_problem(entry | {"loc": place}, keys) for entry in error.errors()[:1]]
    if problems:
        raise ConfigError("\n".join(problems))


def _take_engine_arguments(tree: Mapping[str, Any]) -> list[str]:
    """Move arguments of the chosen engine that have a key in the rollout block to that key, in place. Returns warnings."""
    rollout = (tree.get("actor_rollout_ref") or {}).get("rollout") or {}
    engine = str(rollout.get("name"))
    known = compat().engine_arguments.get(engine, {})
    given = rollout.get("engine_kwargs")
    own = given.get(engine) if isinstance(given, Mapping) else None
    own = own if isinstance(own, dict) else {}
    notes = []
    for name in sorted(own.keys() & known.keys()):
        rollout[known[name]] = own.pop(name)
        notes.append(f"actor_rollout_ref.rollout.engine_kwargs.{engine}.{name} sets actor_rollout_ref.rollout.{known[name]}")
    return notes


@cache
def _adapter(schema: type) -> TypeAdapter[Any]:
    return TypeAdapter(schema)


def _convert(node: Mapping[str, Any], leaves: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Convert other spellings of a value: one file to a list, a number to a name (2024), fp32 to float32, ~ to the home."""
    converted: dict[str, Any] = {}
    for name, value in node.items():
        key = f"{prefix}{name}"
        if key not in leaves:
            converted[name] = _convert(value, leaves, f"{key}.") if isinstance(value, Mapping) else value
            continue
        if (block := followed(leaves[key])) is not None:
            below = {f"{key}.{leaf}": annotation for leaf, annotation in keys_of(block).leaves.items()}
            converted[name] = _convert(value, below, f"{key}.") if isinstance(value, Mapping) else value
            continue
        annotation = bare_type(leaves[key])
        # YAML parses a name such as 2024 as a number.
        if annotation is str and isinstance(value, int | float) and not isinstance(value, bool):
            value = str(value)
        if isinstance(value, str | bool) or (value is None and not takes_null(leaves[key])):
            spellings = compat().spellings
            value = spellings.get(key, spellings.get(name, {})).get("null" if value is None else value, value)
        if isinstance(value, str):
            value = _home(value)
            value = [value] if annotation == list[str] else value
        elif isinstance(value, list):
            value = [_home(item) if isinstance(item, str) else item for item in value]
        converted[name] = value
    return converted


def _home(text: str) -> str:
    return os.path.expanduser(text) if text.startswith("~/") else text


def _floats(node: Any, key: str) -> list[tuple[str, float]]:
    if isinstance(node, float):
        return [(key, node)]
    items = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    return [found for name, value in items for found in _floats(value, f"{key}.{name}".lstrip("."))]


def _problems(error: ValidationError, keys: Keys) -> list[str]:
    # Many missing keys mean that the user's YAML does not extend a root YAML: one line about the cause instead of hundreds.
    missing = [".".join(map(str, entry["loc"])) for entry in error.errors() if entry["type"] == "missing"]
    if len(missing) > TOO_MANY_MISSING:
        return [
            f"{len(missing)} keys are missing, the first is {missing[0]}: a configuration must extend a built-in one; add "
            "`defaults: [ppo_trainer, _self_]` (or sft_trainer) at the top"
        ]
    # A union of an int and a Literal yields an error per branch; the int branch already lists the words.
    return [_problem(entry, keys) for entry in error.errors() if not str(entry["loc"][-1]).startswith("literal[")]


def _problem(entry: Any, keys: Keys) -> str:
    """One line for one error of pydantic."""
    key = ".".join(map(str, entry["loc"]))
    if entry["type"] == "missing":
        return f"{key}: missing; set a value"
    allowed = WORDS.get(entry["type"]) or re.sub(r"^\w+ should", "must", entry["msg"])
    annotation = keys.annotation(key)
    above, _, branch = key.rpartition(".")
    if branch == "int" and (
        words := [get_args(part) for part in get_args(keys.annotation(above)) if get_origin(part) is Literal]
    ):
        key, allowed = above, f"{allowed}, or {', '.join(words[0])}"
    nearest = ""
    if entry["type"] == "literal_error":
        choices = get_args(bare_type(annotation))
        allowed = f"must be one of {', '.join(choices)}"
        nearest = compat().why_not(key, str(entry["input"])) or did_you_mean(str(entry["input"]), choices)
    null = " or null" if takes_null(annotation) else ""
    return f"{key}={json.dumps(entry['input'])}: {allowed}{null}{nearest}"


def untyped(tree: dict[str, Any]) -> Any:
    """A configuration as code of the user expects it: keys are attributes, and ``get`` has a default."""
    return OmegaConf.create(tree)
