"""Translate the flags of a command line to entries, one per flag or per group of flags that only translate together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from configs.base.keys import ConfigError
from configs.compat.openrlhf.arguments import Arguments
from configs.compat.openrlhf.table import Flag, Settings

Kind = Literal["mapped", "implied", "none", "idle"]
Rule = Callable[[Arguments], Iterable["Entry"]]
"""Translates several flags to several keys. Raises ConfigError if a value cannot be translated."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Translation of one or more flags.

    flags: names. kind: mapped: keys are set; implied: the behaviour is always on here; none: no counterpart; idle: the keys
    belong to a model that the run does not have. said: remark after the verdict. settings: keys to set.
    """

    flags: tuple[str, ...]
    kind: Kind
    said: str = ""
    settings: Settings = field(default_factory=dict)


def mapped(flags: Iterable[str], settings: Mapping[str, Any], said: str = "") -> Entry:
    return Entry(tuple(flags), "mapped", said, settings)


def none(flags: Iterable[str], said: str) -> Entry:
    return Entry(tuple(flags), "none", said)


def implied(flags: Iterable[str], said: str) -> Entry:
    return Entry(tuple(flags), "implied", said)


@dataclass(frozen=True, slots=True)
class Translation:
    """Entries of a command line. typed: of flags on it. defaults: of OpenRLHF's behaviour for absent flags."""

    typed: tuple[Entry, ...]
    defaults: tuple[Entry, ...]


def translate(arguments: Arguments, rules: Mapping[str, Rule], without: Mapping[str, str]) -> Translation:
    """Translate all flags. without: {prefix of keys: reason why the run does not use them}.

    Raises ConfigError with a line for each problem.
    """
    problems: list[str] = []
    typed: list[Entry] = []
    defaults = [mapped((), settings, why) for why, settings in arguments.source.always]
    # Flags on the command line first, in their order, so that the comments of the script follow it; then absent flags.
    order = [*arguments.typed, *(name for name in arguments.source.flags if not arguments.has(name))]
    done: set[str] = set()
    for name in order:
        flag = arguments.source.flags[name]
        # A rule covers all flags that name it: it is applied once, at the first of them.
        if flag.rule in done:
            continue
        done |= {flag.rule} if flag.rule else set()
        try:
            found = list(rules[flag.rule](arguments) if flag.rule else plain(flag, arguments))
        # Collected, so that one call reports all problems of a command line.
        except ConfigError as error:
            problems.append(str(error))
            continue
        for entry in found:
            (typed if any(map(arguments.has, entry.flags)) else defaults).append(_useful(entry, without))
    if problems:
        raise ConfigError("\n".join(problems))
    return Translation(tuple(typed), tuple(entry for entry in defaults if entry.kind == "mapped"))


def plain(flag: Flag, arguments: Arguments) -> Iterator[Entry]:
    """Translate a flag without a rule, by its entry in configs/openrlhf.yaml. Raises ConfigError for an unknown value."""
    name, typed, words = flag.name, arguments.has(flag.name), arguments.words(flag.name)
    if not typed and not words:
        if flag.absent and flag.is_of(arguments.newer):
            yield mapped((name,), flag.absent)
    elif flag.values is not None and words[0] in flag.values:
        ours = flag.values[words[0]]
        yield mapped((name,), ours, flag.note) if ours else implied((name,), flag.implied)
    elif flag.values is not None and not flag.none:
        raise ConfigError(f"--{arguments.spelt(name)} {words[0]}: is none of {', '.join(flag.values)}")
    elif flag.none:
        yield none((name,), flag.none)
    elif flag.implied:
        yield implied((name,), flag.implied)
    else:
        value: Any = words[0] if flag.takes == 1 else list(words)
        settings = dict.fromkeys(flag.to, value) | dict(zip(flag.spread, words, strict=False)) | dict(flag.also)
        yield mapped((name,), settings, flag.note)


def _useful(entry: Entry, without: Mapping[str, str]) -> Entry:
    """Remove keys of models that the run does not have; an entry without remaining keys becomes idle."""
    left = {key: value for key, value in entry.settings.items() if not key.startswith(tuple(without))}
    if left or not entry.settings:
        return replace(entry, settings=left)
    (why, *_) = (why for beginning, why in without.items() if next(iter(entry.settings)).startswith(beginning))
    return Entry(entry.flags, "idle", why)
