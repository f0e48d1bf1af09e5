"""Flags of OpenRLHF: the table in configs/openrlhf.yaml, and a command line parsed with it as argparse does.

There are two spellings of the flags; the newer one has dots (--actor.adam.lr). Both are accepted, and the spelling that is used
decides which defaults apply.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from configs.base.keys import CONFIG_DIR, ConfigError, did_you_mean
from configs.compat.translate import read_yaml

DEFAULT_PROGRAM = "train_ppo_ray"
PROGRAM = re.compile(r"(?:.*[./])?openrlhf[./]cli[./](\w+?)(?:\.py)?")
NUMBER = re.compile(r"-?\.?\d.*")
Settings = Mapping[str, Any]
"""{target key: value}. A text comes from the command line and is converted to the key's type."""


@dataclass(frozen=True, slots=True)
class Remarks:
    """Texts printed with a translated flag; see the head of configs/openrlhf.yaml."""

    note: str = ""
    implied: str = ""
    none: str = ""


NO_REMARKS = Remarks()


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """A flag. name: the older spelling, or the newer one if there is none. Other fields: head of configs/openrlhf.yaml."""

    name: str
    newer: tuple[str, ...]
    takes: int | str = 1
    to: tuple[str, ...] = ()
    spread: tuple[str, ...] = ()
    also: Settings = field(default_factory=dict)
    values: Mapping[str, Any] | None = None
    convert: str = ""
    default: Any = None
    newer_default: Any = None
    absent: Settings = field(default_factory=dict)
    part_of: str = ""
    remarks: Remarks = NO_REMARKS
    rule: str = ""
    secret: bool = False

    def is_of(self, newer: bool) -> bool:
        """Whether the newer (else the older) command line has this flag."""
        return bool(self.newer) if newer else "." not in self.name

    def default_words(self, newer: bool) -> tuple[str, ...]:
        """Values of an absent flag; () without a default, or if this command line has no such flag."""
        value = self.newer_default if newer and self.newer_default is not None else self.default
        if value is None or not self.is_of(newer):
            return ()
        return tuple(map(str, value if isinstance(value, list) else [value]))


@dataclass(frozen=True, slots=True)
class FlagSource:
    """A program of OpenRLHF. program: its counterpart here. root: the counterpart's YAML.

    always: behaviour of OpenRLHF that no flag controls, as (reason, settings).
    """

    name: str
    program: str
    root: str
    flags: Mapping[str, Flag]
    always: tuple[tuple[str, Settings], ...]

    def parts(self, head: str) -> list[Flag]:
        """Flags that only have an effect together with the flag ``head``."""
        return [flag for flag in self.flags.values() if flag.part_of == head]


@dataclass(frozen=True, slots=True)
class Table:
    """Contents of configs/openrlhf.yaml. others: {program without a counterpart: reason}."""

    sources: Mapping[str, FlagSource]
    others: Mapping[str, str]


@cache
def openrlhf() -> Table:
    """The parsed table."""
    tree: Any = read_yaml(CONFIG_DIR / "openrlhf.yaml")
    sources = {}
    for name, entry in tree["programs"].items():
        flags: dict[str, Any] = {}
        for group in entry.get("groups", []):
            flags |= tree["groups"][group]
        flags |= entry["flags"]
        sources[name] = FlagSource(
            name,
            entry["program"],
            entry["root"],
            {older: _flag(older, fields) for older, fields in flags.items()},
            tuple((item["why"], item["set"]) for item in entry.get("always", [])),
        )
    return Table(sources, tree["others"])


def _flag(name: str, fields: Mapping[str, Any]) -> Flag:
    newer = tuple(fields.get("newer", name if "." in name else "").split())
    lists = {key: tuple(fields[key].split()) for key in ("to", "spread") if key in fields}
    remarks = Remarks(**{key: fields[key] for key in ("note", "implied", "none") if key in fields})
    others = {key: value for key, value in fields.items() if key not in ("note", "implied", "none")}
    return Flag(name=name, remarks=remarks, **{**others, **lists, "newer": newer})


@dataclass(frozen=True, slots=True)
class Arguments:
    """A parsed command line. newer: it uses the spelling with dots. typed: {flag: (spelling used, values)}, in order."""

    source: FlagSource
    newer: bool
    typed: Mapping[str, tuple[str, tuple[str, ...]]]

    def has(self, name: str) -> bool:
        """Whether the flag ``name`` is on the command line."""
        return name in self.typed

    def words(self, name: str) -> tuple[str, ...]:
        """Values of ``name``, or its default; () if this spelling has no such flag."""
        return self.typed[name][1] if name in self.typed else self.source.flags[name].default_words(self.newer)

    def text(self, name: str) -> str | None:
        """The first value of ``name``; None without a value."""
        return next(iter(self.words(name)), None)

    def numbers(self, name: str) -> list[float]:
        """Values of ``name`` as numbers. Raises ConfigError if one is not a number."""
        words = self.words(name)
        assert words, f"{name} has no default"
        try:
            return [float(word) for word in words]
        except ValueError as error:
            raise ConfigError(f"--{self.spelt(name)} {' '.join(words)}: is not a number") from error

    def number(self, name: str) -> float:
        return self.numbers(name)[0]

    def count(self, name: str) -> int:
        return int(self.number(name))

    def spelt(self, name: str) -> str:
        """Spelling of ``name`` as used, or as the command line's spelling would have it."""
        if name in self.typed:
            return self.typed[name][0]
        newer = self.source.flags[name].newer
        return newer[0] if self.newer and newer else name


def read(words: Sequence[str], table: Table) -> Arguments:
    """Parse ``words``: a program of OpenRLHF, optionally after a launcher, and its flags; flags alone are train_ppo_ray's.

    Raises ConfigError with a line for each error.
    """
    name, flags = _program(words)
    if name in table.others:
        raise ConfigError(f"{name}: {table.others[name]}")
    if name not in table.sources:
        known = [*table.sources, *table.others]
        raise ConfigError(f"{name}: there is no such program of OpenRLHF{did_you_mean(name, known)}")
    source = table.sources[name]
    spellings = {spelling: flag for flag in source.flags.values() for spelling in (flag.name, *flag.newer)}
    typed: dict[str, tuple[str, tuple[str, ...]]] = {}
    problems: list[str] = []
    waiting = list(flags)
    while waiting:
        word = waiting.pop(0)
        spelling, equals, value = word.removeprefix("--").partition("=")
        values = [value] if equals else []
        # A negative number is a value, not a flag.
        while waiting and not equals and (not waiting[0].startswith("-") or NUMBER.fullmatch(waiting[0])):
            values.append(waiting.pop(0))
        flag = spellings.get(spelling) if word.startswith("--") else None
        if flag is None:
            shown = f"--{spelling}" if word.startswith("--") else word
            problems.append(f"{shown}: {name} has no such flag{did_you_mean(shown, [f'--{known}' for known in spellings])}")
        elif flag.takes != "many" and len(values) != flag.takes:
            problems.append(f"--{spelling}: takes {flag.takes} value{'s' if flag.takes != 1 else ''}, not {len(values)}")
        else:
            typed[flag.name] = (spelling, tuple(values))  # the last occurrence of a repeated flag counts, as in argparse
    if problems:
        raise ConfigError("\n".join(problems))
    # One dotted flag is enough: only the newer command line has dots. The defaults of absent flags follow from it.
    return Arguments(source, any("." in spelling for spelling, _ in typed.values()), typed)


def _program(words: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The program and the words after it, without a launcher in front (python -m, deepspeed, ray job submit ... --)."""
    for i, word in enumerate(words):
        if match := PROGRAM.fullmatch(word):
            return match[1], words[i + 1 :]
    if words and not words[0].startswith("-"):
        return words[0].removesuffix(".py"), words[1:]
    return DEFAULT_PROGRAM, words
