"""Dotted keys of a schema: lookup, suggestions for misspelled keys, and their descriptions in the YAML."""

import dataclasses
import difflib
import re
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

CONFIG_DIR = Path(__file__).resolve().parents[1]


class ConfigError(ValueError):
    """Invalid configuration; the message has one line per problem, in terms of the user's keys."""


@dataclass(frozen=True)
class Follows:
    """Annotation of a block whose YAML lists only the differences from the block at ``key``, usually none."""

    key: str


@dataclass(frozen=True)
class Keys:
    """Dotted keys of a schema.

    leaves: {dotted key: annotation}. nodes: the inner keys above them. A free-form leaf (a dict) accepts any keys below it.
    A block that follows another one counts as a single leaf, because it has a single line in the YAML and in the documentation.
    """

    leaves: Mapping[str, Any]
    nodes: frozenset[str]

    def is_free_form(self, key: str) -> bool:
        """Whether ``key`` is a free-form leaf, below one, or inside a block that follows another one."""
        above = self._leaf_above(key)
        if above is None:
            return False
        block = followed(self.leaves[above])
        if block is None:
            return get_origin(bare_type(self.leaves[above])) is dict
        return above == key or keys_of(block).knows(key.removeprefix(f"{above}."))

    def _leaf_above(self, key: str) -> str | None:
        """The leaf that equals ``key`` or is a prefix of it; None if there is none."""
        parts = key.split(".")
        above = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
        return next((name for name in above if name in self.leaves), None)

    def annotation(self, key: str) -> Any:
        """Annotation of a leaf, also inside a block that follows another one; None if the key does not exist."""
        above = self._leaf_above(key)
        if above is None or above == key:
            return self.leaves.get(key)
        block = followed(self.leaves[above])
        return None if block is None else keys_of(block).annotation(key.removeprefix(f"{above}."))

    def knows(self, key: str) -> bool:
        return key in self.leaves or key in self.nodes or self.is_free_form(key)

    def did_you_mean(self, key: str, others: Iterable[str] = ()) -> str:
        """Suffix of an error about the unknown ``key``: "; did you mean ...?", or empty if no key is similar."""
        parts = key.split(".")
        above = self._leaf_above(key)
        block = None if above is None else followed(self.leaves[above])
        if block is not None:
            near = keys_of(block)
            words = did_you_mean(key.removeprefix(f"{above}."), [*near.leaves, *near.nodes])
            return words.replace("did you mean ", f"did you mean {above}.")
        # A correct last part in the wrong block is the most common mistake, and string similarity would miss it for long
        # prefixes.
        same_name = [leaf for leaf in self.leaves if leaf.split(".")[-1] == parts[-1]]
        if same_name:
            return f"; did you mean {max(same_name, key=lambda leaf: len(set(parts) & set(leaf.split('.'))))}?"
        return did_you_mean(key, [*self.leaves, *self.nodes, *others])


def keys_of(schema: type) -> Keys:
    """All dotted keys of a schema (a dataclass)."""
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
            assert isinstance(annotation, type)  # narrows the type for mypy; is_dataclass also accepts instances
            found |= _leaves(annotation, f"{prefix}{name}.")
        else:
            found[prefix + name] = annotation
    return found


def followed(annotation: Any) -> type | None:
    """The dataclass of a block that follows another one; None for any other annotation."""
    is_block = get_origin(annotation) is Annotated and any(isinstance(note, Follows) for note in annotation.__metadata__)
    return annotation.__origin__ if is_block else None


def filled(tree: Mapping[str, Any], schema: type) -> dict[str, Any]:
    """A copy of ``tree`` in which the blocks that follow other blocks are complete."""
    whole = dict(tree)
    for key, annotation in keys_of(schema).leaves.items():
        if followed(annotation) is None:
            continue
        (follows,) = (note for note in annotation.__metadata__ if isinstance(note, Follows))
        *path, last = key.split(".")
        model, above = _below(whole, follows.key.split(".")), _below(whole, path)
        # A missing block, or a value in place of one, is reported by the schema validation, with a better message than here.
        if isinstance(model, Mapping) and isinstance(above, Mapping) and isinstance(above.get(last) or {}, Mapping):
            node = whole
            # Copy every level on the path, so that the caller's tree is not modified.
            for part in path:
                node[part] = dict(node[part])
                node = node[part]
            node[last] = merged(model, node.get(last) or {})
    return whole


def _below(tree: Any, path: Iterable[str]) -> Any:
    """The value at ``path``; None if it does not exist."""
    for part in path:
        tree = tree.get(part) if isinstance(tree, Mapping) else None
    return tree


def merged(defaults: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``defaults`` with the values of ``changes`` merged in at any depth."""
    both = {
        name: merged(defaults[name], value) if isinstance(value, dict) and isinstance(defaults.get(name), dict) else value
        for name, value in changes.items()
    }
    return {**defaults, **both}


def takes_null(annotation: Any) -> bool:
    """Whether the annotation allows None."""
    return types.NoneType in get_args(annotation)


def bare_type(annotation: Any) -> Any:
    """The annotation without ``| None``."""
    if takes_null(annotation):
        (annotation,) = (part for part in get_args(annotation) if part is not types.NoneType)
    return annotation


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """ "; did you mean X?" for the most similar known word; empty if none is similar."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


@dataclass(frozen=True)
class Described:
    """Value and comment of a leaf, as written in a YAML file."""

    value: str
    comment: str


def described(path: Path) -> dict[str, Described]:
    """{dotted key: text of value and comment} of one of the YAML files in configs/ (two spaces per level, one key per line).

    Keys merged by `<<: *name` get the descriptions of the block with the anchor &name.
    """
    # A line-based parser, because YAML libraries drop comments, and comments are the documentation of the keys.
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
