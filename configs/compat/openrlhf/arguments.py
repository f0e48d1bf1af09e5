"""A command line of OpenRLHF, read as its own argparse would, by the flags of configs/openrlhf.yaml."""

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
    """newer: the spelling with dots. typed: {name of a flag: (as it is spelt, the words behind it)}, in their order."""

    source: FlagSource
    newer: bool
    typed: Mapping[str, tuple[str, tuple[str, ...]]]

    def has(self, name: str) -> bool:
        """The flag ``name`` is typed."""
        return name in self.typed

    def words(self, name: str) -> tuple[str, ...]:
        """What stands behind ``name``, or would by default; () where this spelling has no such flag."""
        flag = self.source.flags[name]
        if name in self.typed:
            return self.typed[name][1]
        return flag.words(self.newer) if flag.is_of(self.newer) else ()

    def text(self, name: str) -> str | None:
        """The one word behind ``name``; None for nothing."""
        words = self.words(name)
        return words[0] if words else None

    def number(self, name: str) -> float:
        """Raises ConfigError if it is none."""
        text = self.text(name)
        assert text is not None, f"{name} has no default"
        return number(text, self.spelt(name))

    def count(self, name: str) -> int:
        return int(self.number(name))

    def spelt(self, name: str) -> str:
        """As it was typed, or would be."""
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
    """``words``: a program of OpenRLHF, with whatever launched it, and its flags; the flags alone are train_ppo_ray's.

    Raises ConfigError with a line for each thing that is wrong.
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
    newer = any("." in spelling for spelling, _ in typed.values())
    return Arguments(source, newer, typed)


def _program(words: Sequence[str], table: Table) -> tuple[str, Sequence[str]]:
    """The program, and the words behind it. A launcher in front (python -m, deepspeed, ray job submit ... --) is left out."""
    for i, word in enumerate(words):
        if match := PROGRAM.fullmatch(word):
            return match[1], words[i + 1 :]
    if words and not words[0].startswith("-"):
        return words[0].removesuffix(".py"), words[1:]
    return DEFAULT_PROGRAM, words


def _typed(
    words: Sequence[str], spellings: Mapping[str, Flag], program: str
) -> tuple[dict[str, tuple[str, tuple[str, ...]]], list[str]]:
    """Flags with their words, of a flag that is typed twice the last; and what is wrong."""
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
    return not word.startswith("-") or NUMBER.fullmatch(word) is not None
