"""What becomes of the keys of other systems: configs/compat.yaml."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Sweep
from hydra.errors import HydraException
from omegaconf import OmegaConf

from configs.keys import CONFIG_DIR, ConfigError, Keys


@dataclass(frozen=True, slots=True)
class Accepted:
    """why: it changes nothing. values: for which that holds; None: all. same_as: or the key of ours whose value it must be.

    otherwise: what to do with another.
    """

    why: str
    values: tuple[Any, ...] | None = None
    otherwise: str = ""
    same_as: str | None = None

    def takes(self, value: Any, typed: Callable[[str], Any]) -> bool:
        if self.same_as is not None:
            return value in (f"${{{self.same_as}}}", typed(self.same_as))
        return self.values is None or _is_one_of(value, self.values)


@dataclass(frozen=True, slots=True)
class Translated:
    """why: for the note. otherwise: what to do with a value that is in no case."""

    why: str
    cases: tuple["Case", ...]
    otherwise: str = ""

    def case(self, value: Any) -> "Case | None":
        return next((case for case in self.cases if case.takes(value)), None)


@dataclass(frozen=True, slots=True)
class Case:
    """values: None: any other. sets: our keys in its place, unless they are typed; forces: whatever is typed.

    $value: its own. $typed: what is typed for the key that is set.
    """

    values: tuple[Any, ...] | None
    sets: Mapping[str, Any]
    forces: Mapping[str, Any]

    def takes(self, value: Any) -> bool:
        return _is_one_of(value, self.values) if self.values is not None else not isinstance(value, Sweep)


@dataclass(frozen=True, slots=True)
class Differs:
    """A key under which numbers are not verl's. values: with these alone; unless: with all but these."""

    why: str
    values: tuple[Any, ...] | None
    unless: tuple[Any, ...]

    def holds(self, value: Any) -> bool:
        return not _is_one_of(value, self.unless) and (self.values is None or _is_one_of(value, self.values))


@dataclass(frozen=True, slots=True)
class Instead:
    """What becomes of a foreign key. sets, forces: our keys and their values, in its place; see Case."""

    note: str
    sets: Mapping[str, Any]
    forces: Mapping[str, Any]

    def over(self, typed: Collection[str]) -> dict[str, Any]:
        """What counts beside the keys that are typed."""
        return {name: value for name, value in self.sets.items() if name not in typed} | dict(self.forces)


@dataclass(frozen=True, slots=True)
class Compat:
    """configs/compat.yaml."""

    configs: Mapping[str, str]
    alias: Mapping[str, str]
    spellings: Mapping[str, Mapping[str, str]]
    engine_arguments: Mapping[str, Mapping[str, str]]
    values: Mapping[str, Mapping[str, str]]
    translated: Mapping[str, Translated]
    accepted: Mapping[str, Accepted]
    refused: Mapping[str, str]
    numbers: Mapping[str, Differs]

    def rename(self, key: str, keys: Keys) -> str:
        """Our name for ``key``; ``key`` itself when it has none in this program."""
        for pattern, ours in self.alias.items():
            stem, target = pattern.removesuffix(".*"), ours.removesuffix(".*")
            is_inside = pattern != stem and key.startswith(f"{stem}.")
            if (key == stem or is_inside) and keys.knows(target):
                return target + key.removeprefix(stem)
        return key

    def instead(self, key: str, value: Any, keys: Keys, typed: Callable[[str], Any]) -> Instead:
        """For a ``key`` that is none of ours; typed: the value of a key of ours that stands beside it, None if there is none.

        Raises ConfigError if it would change a result, or is unknown.
        """
        patterns = [name for name in (*self.translated, *self.accepted, *self.refused) if fnmatchcase(key, name)]
        if not patterns:
            raise ConfigError(f"{key}: there is no such key{keys.did_you_mean(key)}")
        pattern = max(patterns, key=lambda pattern: (pattern == key, len(pattern)))
        if pattern in self.refused:
            raise ConfigError(f"{key}: {self.refused[pattern]}")
        if pattern in self.accepted:
            accepted = self.accepted[pattern]
            if (differs := self.differs(key, lambda: value)) is not None:
                return Instead(differs, {}, {})
            if not accepted.takes(value, typed):
                raise ConfigError(f"{key}={as_typed(value)}: {accepted.otherwise}")
            return Instead(f"{key} is left out: {accepted.why}", {}, {})
        translated = self.translated[pattern]
        case = translated.case(value)
        if case is None:
            raise ConfigError(f"{key}={as_typed(value)}: {translated.otherwise}")
        if any("$typed" in str(ours) and not isinstance(typed(name), str) for name, ours in case.forces.items()):
            raise ConfigError(f"{key}={as_typed(value)}: {translated.otherwise}")
        sets, forces = (
            {name: _filled(ours, value, typed(name)) for name, ours in side.items() if keys.knows(name)}
            for side in (case.sets, case.forces)
        )
        said = ", ".join(f"{name}={as_typed(ours)}" for name, ours in {**sets, **forces}.items())
        return Instead(f"{key}={as_typed(value)} {f'sets {said}' if said else 'is left out'}: {translated.why}", sets, forces)

    def differs(self, key: str, value: Callable[[], Any]) -> str | None:
        """What is computed otherwise than by verl with this value of ``key``, for a note; None if nothing is."""
        entries = (entry for pattern, entry in self.numbers.items() if fnmatchcase(key, pattern) and entry.holds(value()))
        return next((f"{key}={as_typed(value())}: other numbers than in verl: {entry.why}" for entry in entries), None)

    def is_translated(self, key: str, value: str | None, keys: Keys) -> bool:
        """``key`` is ours, a leaf or a block, and the ``value`` as typed is one that others have alone."""
        entry = self.translated.get(key)
        return entry is not None and (key not in keys.leaves or entry.case(parsed(key, value)) is not None)

    def why_not(self, key: str, value: Any) -> str:
        """Why there is no such ``value`` of a key of ours, which other systems have; nothing for one that nobody has."""
        told = [why[value] for pattern, why in self.values.items() if fnmatchcase(key, pattern) and value in why]
        return f"; {told[0]}" if told else ""


@cache
def compat() -> Compat:
    tree = read(CONFIG_DIR / "compat.yaml")  # ${...} in it is resolved where it is set
    accepted = {
        key: Accepted(entry)
        if isinstance(entry, str)
        else Accepted(
            entry["why"], tuple(entry["values"]) if "values" in entry else None, entry["otherwise"], entry.get("same_as")
        )
        for key, entry in tree["accepted"].items()
    }
    translated = {
        key: Translated(
            entry["why"],
            tuple(
                Case(tuple(case["values"]) if "values" in case else None, case.get("sets", {}), case.get("forces", {}))
                for case in entry["cases"]
            ),
            entry.get("otherwise", ""),
        )
        for key, entry in tree["translated"].items()
    }
    numbers = {
        key: Differs(entry["why"], tuple(entry["values"]) if "values" in entry else None, tuple(entry.get("unless", ())))
        for key, entry in tree["numbers"].items()
    }
    rest = {name: tree[name] for name in ("configs", "alias", "spellings", "engine_arguments", "values", "refused")}
    return Compat(accepted=accepted, translated=translated, numbers=numbers, **rest)


def read(file: Path) -> Any:
    """A YAML file of ours, by libyaml: the parser in Python takes a tenth of what a dry run takes."""
    return yaml.load(file.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)


def parsed(key: str, text: str | None) -> Any:
    """A value as Hydra reads it; a sweep is none of the values that a key may be limited to."""
    try:
        return None if text is None else OverridesParser.create().parse_override(f"{key}={text}").value()
    except HydraException as error:
        raise ConfigError(f"{key}={text}: cannot be read; put the value in quotes") from error


def as_typed(value: Any) -> str:
    """A value as one types it."""
    return {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else str(value)


def _filled(template: Any, value: Any, typed: Any) -> Any:
    """A value of Case.sets or forces with $value and $typed in it."""
    if not isinstance(template, str) or template == "$value":
        return value if template == "$value" else template
    text = ".".join(map(str, value)) if isinstance(value, list) else as_typed(value)
    return template.replace("$typed", str(typed)).replace("$value", text)


def _share(part: Any, whole: Any) -> Any:
    """part / whole; what is no number stays, for the key's own check to refuse."""
    if not isinstance(part, int | float) or not isinstance(whole, int | float):
        return part
    return part / whole if whole else math.inf


OmegaConf.register_new_resolver("share", _share)


def _is_one_of(value: Any, values: Collection[Any]) -> bool:
    return any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in values)
