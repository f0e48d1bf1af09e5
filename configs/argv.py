"""Normalises what a user typed, before Hydra sees it, and by the same rules the keys of a user's YAML.

Aliases become our names, `+key=v` of an existing key becomes an override, keys of other systems are translated, or left out
with a note where they cannot change a result, and a misspelt one fails at once and names the nearest: configs/compat.yaml.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from configs.compat import Instead, as_typed, compat, parsed, read
from configs.keys import CONFIG_DIR, ConfigError, Keys, bare_type, did_you_mean, followed, keys_of, takes_null
from configs.secret_names import secrets_in

FLAGS = {"--help", "-h", "--hydra-help", "--resolve", "--run", "-r", "--multirun", "-m"}
FLAGS_WITH_VALUE = {"--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd"}
CONFIG_PATH, CONFIG_NAME, CONFIG_DIRECTORY = {"--config-path", "-cp"}, {"--config-name", "-cn"}, {"--config-dir", "-cd"}
TYPED_SECRET = (
    "a secret on the command line is seen by all users of the machine, and kept in the shell's history; put it into an "
    "environment variable, and if the key must be set, give it as '${oc.env:NAME}'"
)
VERL_DIRECTORY = ("trainer", "config")
INFO_FLAGS = {"--info", "-i"}  # may have a value
OVERRIDE = re.compile(r"(?P<mark>\+\+|\+|~)?(?P<key>[^=@]+)(?P<package>@[^=]*)?(?:=(?P<value>.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class CommandLine:
    """flags: Hydra's own. overrides: key=value and group=option, each key once. typed: the keys among them, by our names.

    notes: lines for the user.
    """

    flags: tuple[str, ...]
    overrides: tuple[str, ...]
    typed: frozenset[str]
    notes: tuple[str, ...]


def normalise(argv: Sequence[str], schema: type, root: str) -> CommandLine:
    """What Hydra is to see of ``argv`` (without the program's name) in the program with this schema and root YAML.

    Of several values of a key the last counts. Raises ConfigError with a line for each word that is wrong.
    """
    flags, words = _split(argv)
    flags, notes = _with_our_configs(flags, root)
    keys, names, groups = keys_of(schema), compat(), Groups.of(root, flags)
    problems: list[str] = []
    chosen: dict[str, re.Match[str]] = {}
    for word in _words(words, keys):
        match = OVERRIDE.fullmatch(word)
        if match is None or (match["value"] is None and match["mark"] != "~"):
            options = [f"{group}={word}" for group in groups_of(root) if (CONFIG_DIR / group / f"{word}.yaml").exists()]
            meant = f"; did you mean {options[0]}?" if options else "" if word in keys.leaves else keys.did_you_mean(word)
            problems.append(f"{word}: an override is key=value{meant or '; give it a value'}")
            continue
        key = match["key"] if groups.owns(match["key"]) else names.rename(match["key"], keys)
        name = key + (match["package"] or "")
        chosen.pop(name, None)  # the last one counts, and where it stands
        chosen[name] = match

    def typed_value(name: str) -> Any:
        return parsed(name, chosen[name]["value"]) if name in chosen else None

    overrides: dict[str, str] = {}
    typed: set[str] = set()
    translated: list[Instead] = []
    for name, match in chosen.items():
        if told := list(secrets_in(name, _as_value(match["value"]))):
            problems += [f"{key}: {TYPED_SECRET}" for key in told]
            continue
        mark = match["mark"] or ""
        tail = "" if match["value"] is None else f"={match['value']}"
        if name in keys.leaves and bare_type(keys.leaves[name]) is str and re.fullmatch(r"=[\d.]+_[\d.]+", tail):
            tail = f"='{tail[1:]}'"  # two bounds; Hydra would read 0.5_5 as the number 0.55
        if groups.owns(match["key"]):
            is_listed = match["key"] in groups.listed
            overrides[name] = ("" if is_listed and mark != "~" else mark) + name + tail
        elif _sets_nothing(name, match["key"] + (match["package"] or ""), match["value"], keys):
            notes.append(f"{match['key']}=null is left out: it sets nothing")
        elif keys.knows(name) and not names.is_translated(name, match["value"], keys):
            overrides[name] = ("~" if mark == "~" else "++" if keys.is_free_form(name) else "") + name + tail
            typed.add(name)
            if (differs := names.differs(name, partial(typed_value, name))) is not None:
                notes.append(differs)
        else:
            try:
                translated.append(names.instead(name, parsed(name, match["value"]), keys, typed_value))
            except ConfigError as error:
                problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    for instead in translated:
        notes.append(instead.note)
        overrides |= {name: f"{name}={_quoted(as_typed(value))}" for name, value in instead.over(typed).items()}
    return CommandLine(tuple(flags), tuple(overrides.values()), frozenset(typed), tuple(notes))


def normalise_tree(tree: Mapping[str, Any], schema: type, typed: Collection[str] = ()) -> tuple[dict[str, Any], list[str]]:
    """The same for a composed tree, unresolved, which holds what stood in a user's YAML; returns it in our names, and notes.

    typed: keys of the command line, which win over an alias in the YAML. Raises ConfigError with a line for each wrong key.
    """
    keys, names = keys_of(schema), compat()
    ours: dict[str, Any] = {}
    foreign: dict[str, Any] = {}
    for key, value in _leaves(tree, keys):
        name = names.rename(key, keys)
        if name == key and keys.knows(key):
            ours[key] = value
        else:
            foreign[name] = value
    notes: list[str] = []
    problems: list[str] = []
    for name, value in foreign.items():
        if keys.knows(name):
            ours |= {} if name in typed or _sets_nothing(name, "", value, keys) else {name: value}
            continue
        try:
            instead = names.instead(name, value, keys, ours.get)
        except ConfigError as error:
            problems.append(str(error))
            continue
        notes.append(instead.note)
        ours |= instead.over(typed)
    if problems:
        raise ConfigError("\n".join(problems))
    nested: dict[str, Any] = {}
    for name, value in ours.items():
        *path, last = name.split(".")
        node = nested
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return nested, notes


@cache
def groups_of(root: str) -> tuple[str, ...]:
    """The groups in the defaults list of a root YAML, in its order."""
    return tuple(name for entry in read(CONFIG_DIR / f"{root}.yaml")["defaults"] if entry != "_self_" for name in entry)


@cache
def configs_of(root: str) -> tuple[str, ...]:
    """Our whole configurations of the program with this root: the root, and those that start from it."""
    trees = {file.stem: read(file) for file in sorted(CONFIG_DIR.glob("*.yaml"))}
    return (root, *(name for name, tree in trees.items() if root in tree.get("defaults", ())))


@dataclass(frozen=True, slots=True)
class Groups:
    """listed: the groups in the root's defaults list. directories: where options lie, ours first."""

    listed: frozenset[str]
    directories: tuple[Path, ...]

    @classmethod
    def of(cls, root: str, flags: Sequence[str]) -> "Groups":
        typed = [Path(value) for flag, value in pairwise(flags) if flag in CONFIG_DIRECTORY]
        return cls(frozenset(groups_of(root)), (CONFIG_DIR, *typed))

    def owns(self, key: str) -> bool:
        """``key=...`` chooses an option of a group, or is Hydra's own, and not a key of the configuration."""
        return re.match(r"hydra($|[./])", key) is not None or any((directory / key).is_dir() for directory in self.directories)


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Hydra's flags with their values, and the overrides: they may stand in any order."""
    flags: list[str] = []
    words: list[str] = []
    waiting = list(argv)
    while waiting:
        word = waiting.pop(0)
        flag, equals, value = word.partition("=")
        if not word.startswith("-"):
            words.append(word)
        elif flag in FLAGS_WITH_VALUE and (equals or waiting):
            flags += [flag, value if equals else waiting.pop(0)]
        elif flag in INFO_FLAGS:
            is_given = waiting and re.fullmatch(r"[a-z-]+", waiting[0])
            flags += [flag, value if equals else waiting.pop(0) if is_given else "all"]
        elif word in FLAGS:
            flags.append(word)
        elif equals:
            raise ConfigError(f"{word}: an override has no dashes; write {word.lstrip('-')}")
        else:
            near = did_you_mean(word, FLAGS | FLAGS_WITH_VALUE | INFO_FLAGS) or "; leave it out, --help names them"
            raise ConfigError(f"{word}: there is no such flag{near}")
    return flags, words


def _words(words: Sequence[str], keys: Keys) -> Iterator[str]:
    """With a word for each key in the braces of one that is not ours: node={a: 1, b: 2}."""
    for word in words:
        match = OVERRIDE.fullmatch(word)
        value = None if match is None else _as_value(match["value"])
        if match is None or not isinstance(value, dict) or not value or keys.knows(compat().rename(match["key"], keys)):
            yield word
            continue
        below = [f"{match['mark'] or ''}{match['key']}.{name}={_text_of(inner)}" for name, inner in value.items()]
        yield from _words(below, keys)


def _text_of(value: Any) -> str:
    """As Hydra reads it: any text in quotes."""
    if isinstance(value, dict):
        return f"{{{','.join(f'{name}:{_text_of(inner)}' for name, inner in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_text_of, value))}]"
    if not isinstance(value, str):
        return as_typed(value)
    escaped = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), value)
    return f"'{escaped}'"


def _with_our_configs(flags: Sequence[str], root: str) -> tuple[list[str], list[str]]:
    """``flags`` with --config-path, which other systems' scripts give, as --config-dir, and a name of theirs as ours; and notes.

    A directory that does not have the configuration (theirs, which is not here) is left out. Raises ConfigError if nobody has it.
    """
    rest: list[str] = []
    notes: list[str] = []
    path = name = None
    waiting = list(flags)
    while waiting:
        flag = waiting.pop(0)
        if flag in CONFIG_PATH:
            path = waiting.pop(0)
        elif flag in CONFIG_NAME:
            name = waiting.pop(0).removesuffix(".yaml")
        elif flag in CONFIG_DIRECTORY and Path(waiting[0]).parts[-2:] == VERL_DIRECTORY and not Path(waiting[0]).is_dir():
            notes.append(f"--config-dir={waiting.pop(0)} is left out: it is verl's own, and not here")
        else:
            rest.append(flag)
    stem, ours = name or root, configs_of(root)
    is_address = path is not None and "://" in path
    has_it = path is not None and (is_address or Path(path, f"{stem}.yaml").is_file())
    if path is not None and not has_it and compat().configs.get(stem, stem) not in ours:
        raise ConfigError(f"--config-path={path}: there is no {stem}.yaml in it; ours are {', '.join(ours)}, and need no path")
    if path is not None and has_it:
        directory = path if is_address else str(Path(path).absolute())
        rest += ["--config-path" if is_address or stem in ours else "--config-dir", directory]
    if name is not None:
        is_theirs = has_it or any(flag in CONFIG_DIRECTORY for flag in rest)
        rest += ["--config-name", stem if is_theirs else compat().configs.get(stem, stem)]
    return rest, notes


def _as_value(text: str | None) -> Any:
    """A mapping or a list as such, anything else as it was typed."""
    if text is None or not text.startswith(("{", "[")):
        return text
    with suppress(HydraException):  # told where the value counts
        return OverridesParser.create().parse_override(f"value={text}").value()
    return text


def _quoted(text: str) -> str:
    """With a function of ours in it, which Hydra reads in quotes alone."""
    return f"'{text}'" if "${share:" in text else text


def _sets_nothing(name: str, typed: str, value: Any, keys: Keys) -> bool:
    """Another name of a key of ours, at null, which ours cannot be: elsewhere an older name stands there so."""
    annotation = keys.annotation(name)
    return name != typed and value in (None, "null") and annotation is not None and not takes_null(annotation)


def _leaves(tree: Mapping[str, Any], keys: Keys, prefix: str = "") -> list[tuple[str, Any]]:
    """(dotted key, value) of everything in ``tree``; what is one leaf of the schema is one here."""
    found: list[tuple[str, Any]] = []
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and (key not in keys.leaves or followed(keys.leaves[key]) is not None):
            found += _leaves(value, keys, f"{key}.")
        else:
            found.append((key, value))
    return found
