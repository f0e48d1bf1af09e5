"""Parse a command line of OpenRLHF as its own argparse does, with the flags of configs/openrlhf.yaml.

There are two spellings of the flags; the newer one has dots (--actor.adam.lr). Both are accepted, and the spelling that is used
decides which defaults apply.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from configs.base.keys import ConfigError, did_you_mean
from configs.compat.openrlhf.table import Flag, FlagSource, Table

DEFAULT_PROGRAM = "train_ppo_ray"
PROGRAM = re.compile(r"(?:.*[./])?openrlhf[./]cli[./](\w+?)(?:\.py)?")
NUMBER = re.compile(r"-?\.?\d.*")


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
        flag = self.source.flags[name]
        if name in self.typed:
            return self.typed[name][1]
        return flag.words(self.newer) if flag.is_of(self.newer) else ()

    def text(self, name: str) -> str | None:
        """The first value of ``name``; None without a value."""
        words = self.words(name)
        return words[0] if words else None

    def number(self, name: str) -> float:
        """Value of ``name`` as a number. Raises ConfigError if it is not one."""
        text = self.text(name)
        assert text is not None, f"{name} has no default"
        return number(text, self.spelt(name))

    def count(self, name: str) -> int:
        return int(self.number(name))

    def spelt(self, name: str) -> str:
        """Spelling of ``name`` as used, or as the command line's spelling would have it."""
        if name in self.typed:
            return self.typed[name][0]
        newer = self.source.flags[name].newer
        return newer[0] if self.newer and newer else name


def number(text: str, flag: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(f"--{flag} {text}: is not a number") from error


def read(words: Sequence[str], table: Table) -> Arguments:
    """Parse ``words``: a program of OpenRLHF, optionally after a launcher, and its flags; flags alone are train_ppo_ray's.

    Raises ConfigError with a line for each error.
    """
    name, flags = _program(words, table)
    if name in table.others:
        raise ConfigError(f"{name}: {table.others[name]}")
    if name not in table.sources:
        known = [*table.sources, *table.others]
        raise ConfigError(f"{name}: there is no such program of OpenRLHF{did_you_mean(name, known)}")
    source = table.sources[name]
    spellings = {spelling: flag for flag in source.flags.values() for spelling in (flag.name, *flag.newer)}
    typed, problems = _typed(flags, spellings, name)
    if problems:
        raise ConfigError("\n".join(problems))
    # One dotted flag is enough: only the newer command line has dots. The defaults of absent flags follow from it.
    newer = any("." in spelling for spelling, _ in typed.values())
    return Arguments(source, newer, typed)


def _program(words: Sequence[str], table: Table) -> tuple[str, Sequence[str]]:
    """The program and the words after it, without a launcher in front (python -m, deepspeed, ray job submit ... --)."""
    for i, word in enumerate(words):
        if match := PROGRAM.fullmatch(word):
            return match[1], words[i + 1 :]
    if words and not words[0].startswith("-"):
        return words[0].removesuffix(".py"), words[1:]
    return DEFAULT_PROGRAM, words


def _typed(
    words: Sequence[str], spellings: Mapping[str, Flag], program: str
) -> tuple[dict[str, tuple[str, tuple[str, ...]]], list[str]]:
    """Flags with their values, and errors. The last occurrence of a repeated flag counts, as in argparse."""
    typed: dict[str, tuple[str, tuple[str, ...]]] = {}
    problems: list[str] = []
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        spelling, equals, value = word.removeprefix("--").partition("=")
        behind = [value] if equals else []
        while waiting and not equals and _is_value(waiting[0]):
            behind.append(waiting.pop(0))
        flag = spellings.get(spelling) if word.startswith("--") else None
        if flag is None:
            shown = f"--{spelling}" if word.startswith("--") else word
            problems.append(f"{shown}: {program} has no such flag{did_you_mean(shown, [f'--{name}' for name in spellings])}")
            continue
        if flag.takes != "many" and len(behind) != flag.takes:
            problems.append(f"--{spelling}: takes {flag.takes} value{'s' if flag.takes != 1 else ''}, not {len(behind)}")
            continue
        typed[flag.name] = (spelling, tuple(behind))
    return typed, problems


def _is_value(word: str) -> bool:
    """Whether ``word`` is a value, not a flag; a negative number is a value."""
    return not word.startswith("-") or NUMBER.fullmatch(word) is not None
