"""Translate configuration keys from verl and other frameworks; the tables are in configs/compat.yaml.

A foreign key is renamed (alias), expressed by other keys (translated), left out with a warning because it cannot change a result
(accepted), or refused with a remedy. Numerical differences from verl are reported as warnings (numbers). All this is decided by
configs/argv.py. Tables about values (spellings, engine_arguments, values) are for configs/load.py: they apply to resolved values.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Sweep
from hydra.errors import HydraException
from omegaconf import OmegaConf

from configs.base.keys import CONFIG_DIR, ConfigError, Keys


@dataclass(frozen=True, slots=True)
class Case:
    """Some values of a foreign key, and the keys to set for them.

    values: the matching values; None = all others, except a sweep if there are keys to set. sets: keys to set unless they are on
    the command line. forces: keys to set in any case. In both, $value is the value being translated and $typed the command line's
    value of the key that is set.
    """

    values: Sequence[Any] | None = None
    sets: Mapping[str, Any] = field(default_factory=dict)
    forces: Mapping[str, Any] = field(default_factory=dict)

    def takes(self, value: Any) -> bool:
        """Whether ``value`` is one of the values."""
        if self.values is None:
            return not isinstance(value, Sweep) or not (self.sets or self.forces)
        return _is_one_of(value, self.values)

    def over(self, typed: Collection[str]) -> dict[str, Any]:
        """The keys to set, given the keys on the command line."""
        return {name: value for name, value in self.sets.items() if name not in typed} | dict(self.forces)


@dataclass(frozen=True, slots=True)
class Replacement:
    """What replaces a foreign key with its value. given: both, for the warning. case: with its values filled in."""

    given: str
    why: str
    case: Case = Case()

    def over(self, typed: Collection[str]) -> tuple[str, dict[str, Any]]:
        """(warning, keys to set), given the keys that have their values already."""
        values = self.case.over(typed)
        assigned = ", ".join(f"{name}={as_typed(new)}" for name, new in values.items())
        effect = f" sets {assigned}" if assigned else " is left out" if self.given else ""
        return f"{self.given}{effect}: {self.why}".removeprefix(": "), values


@dataclass(frozen=True, slots=True)
class Rule:
    """A foreign key with values that are translated or left out.

    why: reason, for the warning. cases: the first that matches applies. otherwise: remedy for any other value. same_as: instead
    of the cases, the key whose value it must equal. no_effect_with: values of other keys, on the same command line, with which
    every value is left out.
    """

    why: str
    cases: Sequence[Case] = (Case(),)
    otherwise: str = ""
    same_as: str | None = None
    no_effect_with: Mapping[str, Any] = field(default_factory=dict)

    def case(self, value: Any, typed: Callable[[str], Any]) -> Case | None:
        """The case that applies. typed: returns the value of another key on the same command line, None if absent."""
        if any(typed(key) == setting for key, setting in self.no_effect_with.items()):
            return Case()
        if self.same_as is not None:
            return Case() if value in (f"${{{self.same_as}}}", typed(self.same_as)) else None
        return next((case for case in self.cases if case.takes(value)), None)


@dataclass(frozen=True, slots=True)
class Differs:
    """A key whose results differ numerically from verl's. values: only for these values; unless: for all but these."""

    why: str
    values: Sequence[Any] | None = None
    unless: Sequence[Any] = ()

    def holds(self, value: Any) -> bool:
        return not _is_one_of(value, self.unless) and (self.values is None or _is_one_of(value, self.values))


@dataclass(frozen=True, slots=True)
class Compat:
    """Contents of configs/compat.yaml."""

    configs: Mapping[str, str]
    alias: Mapping[str, str]
    spellings: Mapping[str, Mapping[Any, Any]]
    engine_arguments: Mapping[str, Mapping[str, str]]
    values: Mapping[str, Mapping[str, str]]
    translated: Mapping[str, Rule]
    accepted: Mapping[str, Rule]
    refused: Mapping[str, str]
    numbers: Mapping[str, Differs]

    def rename(self, key: str, keys: Keys) -> str:
        """The schema's name of ``key``; ``key`` itself if this program has no alias for it."""
        for pattern, renamed in self.alias.items():
            stem, target = pattern.removesuffix(".*"), renamed.removesuffix(".*")
            is_inside = pattern != stem and key.startswith(f"{stem}.")
            if (key == stem or is_inside) and keys.knows(target):
                return target + key.removeprefix(stem)
        return key

    def instead(self, key: str, value: Any, keys: Keys, typed: Callable[[str], Any]) -> Replacement:
        """What replaces a ``key`` that the schema does not have.

        typed: returns the value of another key on the same command line, None if absent. Raises ConfigError if the key is unknown
        or cannot be ignored.
        """
        patterns = [name for name in (*self.translated, *self.accepted, *self.refused) if fnmatchcase(key, name)]
        if not patterns:
            raise ConfigError(f"{key}: there is no such key{keys.did_you_mean(key)}")
        # The most specific entry is used: an exact key before any pattern, then the longest pattern.
        pattern = max(patterns, key=lambda pattern: (pattern == key, len(pattern)))
        if pattern in self.refused:
            raise ConfigError(f"{key}: {self.refused[pattern]}")
        if (differs := self.differs(key, lambda: value)) is not None:
            return Replacement("", differs)
        rule = self.accepted.get(pattern) or self.translated[pattern]
        case = rule.case(value, typed)
        # $typed extends the value of another key, which must therefore be on the command line too.
        if case is None or any("$typed" in str(new) and not isinstance(typed(name), str) for name, new in case.forces.items()):
            raise ConfigError(f"{key}={as_typed(value)}: {rule.otherwise}")
        if pattern in self.accepted:
            return Replacement(key, rule.why)
        sets, forces = (
            {name: _filled(template, value, typed(name)) for name, template in side.items() if keys.knows(name)}
            for side in (case.sets, case.forces)
        )
        return Replacement(f"{key}={as_typed(value)}", rule.why, Case(sets=sets, forces=forces))

    def differs(self, key: str, value: Callable[[], Any]) -> str | None:
        """Warning that results with this value of ``key`` differ numerically from verl's; None if they do not."""
        entries = (entry for pattern, entry in self.numbers.items() if fnmatchcase(key, pattern) and entry.holds(value()))
        return next((f"{key}={as_typed(value())}: results differ from verl's: {entry.why}" for entry in entries), None)

    def is_translated(self, key: str, value: str | None, keys: Keys) -> bool:
        """Whether ``key`` is in the schema, as leaf or block, but ``value`` is one that only other systems accept."""
        rule = self.translated.get(key)
        if rule is None or key not in keys.leaves:
            return rule is not None
        case = next((case for case in rule.cases if case.takes(parsed(key, value))), None)
        # Where the program has none of the keys to set, leaving the value out would run something else: the schema refuses it.
        names = () if case is None else (*case.sets, *case.forces)
        return case is not None and (not names or any(keys.knows(name) for name in names))

    def takes_text(self, key: str, value: Any) -> bool:
        """Whether ``value``, of a tree, is a text that only other systems accept for a key of the schema."""
        rule = self.translated.get(key)
        return rule is not None and isinstance(value, str) and any(case.values and case.takes(value) for case in rule.cases)

    def why_not(self, key: str, value: str) -> str:
        """Reason why a ``value`` of other systems is not supported here; empty for a value that no system knows."""
        reasons = [why[value] for pattern, why in self.values.items() if fnmatchcase(key, pattern) and value in why]
        return f"; {reasons[0]}" if reasons else ""


@cache
def compat() -> Compat:
    """The parsed tables of configs/compat.yaml."""
    # Read as plain YAML: interpolations in the tables are resolved later, in the configuration that they are set in.
    tree = read_yaml(CONFIG_DIR / "compat.yaml")
    translated = {
        key: Rule(entry["why"], [Case(**case) for case in entry["cases"]], entry.get("otherwise", ""))
        for key, entry in tree["translated"].items()
    }
    # An accepted key has a single case, which sets nothing; a plain text is the reason, for every value.
    accepted = {
        key: Rule(entry)
        if isinstance(entry, str)
        else Rule(
            entry["why"], [Case(entry.get("values"))], entry["otherwise"], entry.get("same_as"), entry.get("no_effect_with", {})
        )
        for key, entry in tree["accepted"].items()
    }
    numbers = {key: Differs(**entry) for key, entry in tree["numbers"].items()}
    rest = {name: tree[name] for name in ("configs", "alias", "spellings", "engine_arguments", "values", "refused")}
    return Compat(translated=translated, accepted=accepted, numbers=numbers, **rest)


def read_yaml(file: Path) -> Any:
    """Load one of the YAML files in configs/."""
    # libyaml, because parsing in pure Python takes a tenth of the time of a dry run.
    return yaml.load(file.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)


def parsed(key: str, text: str | None) -> Any:
    """A value as parsed by Hydra. A sweep is returned as a Sweep object, which equals no value of the tables."""
    try:
        return None if text is None else OverridesParser.create().parse_override(f"{key}={text}").value()
    except HydraException as error:
        raise ConfigError(f"{key}={text}: cannot be parsed; put the value in quotes") from error


def as_typed(value: Any) -> str:
    """A value in command-line syntax."""
    return {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else str(value)


def written(value: Any, plain: re.Pattern[str] | None = None) -> str:
    """A value in Hydra's override grammar. plain: texts that are written without quotes; None = none."""
    if isinstance(value, dict):
        return f"{{{','.join(f'{name}:{written(inner, plain)}' for name, inner in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(written(item, plain) for item in value)}]"
    if not isinstance(value, str) or (plain is not None and plain.fullmatch(value)):
        return as_typed(value)
    # Backslashes are doubled before a quote and at the end of the text, where Hydra reads them as escapes.
    escaped = re.sub(r"(\\*)('|\Z)", lambda end: end[1] * 2 + ("\\'" if end[2] else ""), value)
    return f"'{escaped}'"


def _filled(template: Any, value: Any, typed: Any) -> Any:
    """A value of Case.sets or Case.forces with $value and $typed substituted."""
    if not isinstance(template, str) or template == "$value":
        return value if template == "$value" else template
    text = ".".join(map(str, value)) if isinstance(value, list) else as_typed(value)
    return template.replace("$typed", str(typed)).replace("$value", text)


def _share(part: Any, whole: Any) -> Any:
    """part / whole; a value that is not a number is returned unchanged, so that the key's own validation reports it."""
    if not isinstance(part, int | float) or not isinstance(whole, int | float):
        return part
    return part / whole if whole else math.inf


OmegaConf.register_new_resolver("share", _share)


def _is_one_of(value: Any, values: Collection[Any]) -> bool:
    # True == 1 and False == 0 in Python, but not in a configuration.
    return any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in values)
