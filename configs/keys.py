"""The dotted keys of a schema, the nearest one to a misspelling, and what the YAML says about each."""

import dataclasses
import difflib
import re
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

CONFIG_DIR = Path(__file__).resolve().parent


class ConfigError(ValueError):
    """What is wrong with a configuration: a line for each problem, in the user's terms."""


@dataclass(frozen=True)
class Keys:
    """leaves: {dotted key: its annotation}. nodes: what lies above them. A free-form leaf holds any keys below it."""

    leaves: Mapping[str, Any]
    nodes: frozenset[str]

    def is_free_form(self, key: str) -> bool:
        """``key`` is a free-form leaf or lies below one."""
        parts = key.split(".")
        above = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
        return any(get_origin(bare_type(self.leaves[name])) is dict for name in above if name in self.leaves)

    def knows(self, key: str) -> bool:
        return key in self.leaves or key in self.nodes or self.is_free_form(key)

    def did_you_mean(self, key: str, others: Iterable[str] = ()) -> str:
        """What to add to an error about the unknown ``key``: "; did you mean ...?", or nothing when nothing is near."""
        parts = key.split(".")
        same_name = [leaf for leaf in self.leaves if leaf.split(".")[-1] == parts[-1]]
        if same_name:  # the right word in the wrong place
            return f"; did you mean {max(same_name, key=lambda leaf: len(set(parts) & set(leaf.split('.'))))}?"
        return did_you_mean(key, [*self.leaves, *self.nodes, *others])


def keys_of(schema: type) -> Keys:
    leaves = _leaves(schema, "")
    nodes = {key[:at] for key in leaves for at, letter in enumerate(key) if letter == "."}
    return Keys(leaves=leaves, nodes=frozenset(nodes))


def _leaves(schema: type, prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, annotation in get_type_hints(schema, include_extras=True).items():
        if dataclasses.is_dataclass(annotation):
            assert isinstance(annotation, type)
            found |= _leaves(annotation, f"{prefix}{name}.")
        else:
            found[prefix + name] = annotation
    return found


def takes_null(annotation: Any) -> bool:
    return types.NoneType in get_args(annotation)


def bare_type(annotation: Any) -> Any:
    """The annotation without ``| None``."""
    if takes_null(annotation):
        (annotation,) = (part for part in get_args(annotation) if part is not types.NoneType)
    return annotation


def did_you_mean(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


@dataclass(frozen=True)
class Described:
    """A leaf of a YAML file as it is written there."""

    value: str
    comment: str


def described(path: Path) -> dict[str, Described]:
    """{dotted key: text of its value and of its comment} of a YAML file of ours: two spaces a level, one key a line."""
    found: dict[str, Described] = {}
    above: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        match = re.fullmatch(r"( *)([\w<]+):(?: +(.*?))?(?: +# (.*))?", line)
        if match is None:
            continue
        depth = len(match[1]) // 2
        above[depth:] = [match[2]]
        if match[3] and match[3][0] not in "&#":
            found[".".join(above)] = Described(match[3], match[4] or "")
    return found
