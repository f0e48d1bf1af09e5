"""The dotted keys of a schema, the nearest one to a misspelling, and what the YAML says about each."""

import dataclasses
import difflib
import re
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

CONFIG_DIR = Path(__file__).resolve().parent


class ConfigError(ValueError):
    """What is wrong with a configuration: a line for each problem, in the user's terms."""


@dataclass(frozen=True)
class Follows:
    """In the annotation of a block: its YAML has only what differs from the block at this key, most often nothing."""

    key: str


@dataclass(frozen=True)
class Keys:
    """leaves: {dotted key: its annotation}. nodes: what lies above them. A free-form leaf holds any keys below it.

    A block that follows another is one leaf, for one line in the YAML and one line in the documentation is all there is of it.
    """

    leaves: Mapping[str, Any]
    nodes: frozenset[str]

    def is_free_form(self, key: str) -> bool:
        """``key`` is a free-form leaf, or lies below one, or in a block that follows another."""
        above = self._leaf_above(key)
        if above is None:
            return False
        block = followed(self.leaves[above])
        if block is None:
            return get_origin(bare_type(self.leaves[above])) is dict
        return above == key or keys_of(block).knows(key.removeprefix(f"{above}."))

    def _leaf_above(self, key: str) -> str | None:
        """The leaf that ``key`` is, or lies below."""
        parts = key.split(".")
        above = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
        return next((name for name in above if name in self.leaves), None)

    def annotation(self, key: str) -> Any:
        """Of a leaf, or of one in a block that follows another; None where there is none."""
        above = self._leaf_above(key)
        if above is None or above == key:
            return self.leaves.get(key)
        block = followed(self.leaves[above])
        return None if block is None else keys_of(block).annotation(key.removeprefix(f"{above}."))

    def knows(self, key: str) -> bool:
        return key in self.leaves or key in self.nodes or self.is_free_form(key)

    def did_you_mean(self, key: str, others: Iterable[str] = ()) -> str:
        """What to add to an error about the unknown ``key``: "; did you mean ...?", or nothing when nothing is near."""
        parts = key.split(".")
        above = self._leaf_above(key)
        block = None if above is None else followed(self.leaves[above])
        if block is not None:
            near = keys_of(block)
            words = did_you_mean(key.removeprefix(f"{above}."), [*near.leaves, *near.nodes])
            return words.replace("did you mean ", f"did you mean {above}.")
        same_name = [leaf for leaf in self.leaves if leaf.split(".")[-1] == parts[-1]]
        if same_name:  # the right word in the wrong place
            return f"; did you mean {max(same_name, key=lambda leaf: len(set(parts) & set(leaf.split('.'))))}?"
        return did_you_mean(key, [*self.leaves, *self.nodes, *others])


def keys_of(schema: type) -> Keys:
    return _keys_of(schema)


@cache
def _keys_of(schema: type) -> Keys:
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


def followed(annotation: Any) -> type | None:
    """The dataclass of a block that follows another; None for anything else."""
    is_block = get_origin(annotation) is Annotated and any(isinstance(note, Follows) for note in annotation.__metadata__)
    return annotation.__origin__ if is_block else None


def filled(tree: Mapping[str, Any], schema: type) -> dict[str, Any]:
    """``tree`` with its blocks that follow others whole."""
    whole = dict(tree)
    for key, annotation in keys_of(schema).leaves.items():
        if followed(annotation) is None:
            continue
        (follows,) = (note for note in annotation.__metadata__ if isinstance(note, Follows))
        *path, last = key.split(".")
        model, above = _below(whole, follows.key.split(".")), _below(whole, path)
        if isinstance(model, Mapping) and isinstance(above, Mapping):  # else what is missing is told where the tree is checked
            node = whole
            for part in path:
                node[part] = dict(node[part])
                node = node[part]
            node[last] = merged(model, node.get(last) or {})
    return whole


def _below(tree: Any, path: Iterable[str]) -> Any:
    """What is there; None if nothing is."""
    for part in path:
        tree = tree.get(part) if isinstance(tree, Mapping) else None
    return tree


def merged(defaults: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The tree with some of its values changed, to any depth."""
    both = {
        name: merged(defaults[name], value) if isinstance(value, dict) and isinstance(defaults.get(name), dict) else value
        for name, value in changes.items()
    }
    return {**defaults, **both}


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
    """{dotted key: text of its value and of its comment} of a YAML file of ours: two spaces a level, one key a line.

    What `<<: *name` takes over from the block with &name is described there.
    """
    found: dict[str, Described] = {}
    anchors: dict[str, str] = {}
    above: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        match = re.fullmatch(r"( *)([\w<]+):(?: +(.*?))?(?: +# (.*))?", line)
        if match is None:
            continue
        depth = len(match[1]) // 2
        above[depth:] = [match[2]]
        key, value = ".".join(above), match[3] or ""
        if value.startswith("&"):
            anchors[value[1:]] = key
        elif match[2] == "<<":
            block, model = key.removesuffix("<<"), anchors[value[1:]] + "."
            found |= {block + name.removeprefix(model): leaf for name, leaf in found.items() if name.startswith(model)}
        elif value and not value.startswith("#"):
            found[key] = Described(value, match[4] or "")
    return found
