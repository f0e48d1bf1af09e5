"""Normalize the command line before Hydra parses it, and the keys of a user's YAML by the same rules.

Aliases are renamed, `+key=v` of an existing key becomes a plain override, and keys of other systems are translated, or left out
with a warning if they cannot change a result (configs/compat.yaml). A misspelled key is an error that names the most similar key.

The command line is normalized before composition: the last of several names of a key wins, which a tree cannot show, and a sweep
needs keys of the schema. The keys of a user's YAML follow after composition, because Hydra reads the file.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from configs.base.keys import CONFIG_DIR, ConfigError, Keys, bare_type, did_you_mean, followed, keys_of, takes_null
from configs.base.secrets import secrets_in
from configs.compat.generation_ahead import generation_ahead
from configs.compat.translate import Replacement, as_typed, compat, parsed, read_yaml, written

FLAGS = {"--help", "-h", "--hydra-help", "--resolve", "--run", "-r", "--multirun", "-m"}
FLAGS_WITH_VALUE = {"--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd"}
CONFIG_PATH, CONFIG_NAME, CONFIG_DIRECTORY = {"--config-path", "-cp"}, {"--config-name", "-cn"}, {"--config-dir", "-cd"}
TYPED_SECRET = (
    "a secret on the command line is visible to all users of the machine and stored in the shell's history; use an "
    "environment variable, and set the key to '${oc.env:NAME}' if it is required"
)
VERL_DIRECTORY = ("trainer", "config")
PLAIN = re.compile(r"\w+")  # values that need no quotes
INFO_FLAGS = {"--info", "-i"}  # with an optional value
OVERRIDE = re.compile(r"(?P<mark>\+\+|\+|~)?(?P<key>[^=@]+)(?P<package>@[^=]*)?(?:=(?P<value>.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class CommandLine:
    """Normalized command line.

    flags: Hydra's own. overrides: key=value and group=option, each key once. typed: keys on the command line, by their names in
    the schema. foreign: translated keys by their own names, and the keys that they set. notes: warnings for the user.
    """

    flags: tuple[str, ...]
    overrides: tuple[str, ...]
    typed: frozenset[str]
    notes: tuple[str, ...]
    foreign: frozenset[str] = frozenset()


def normalise(argv: Sequence[str], schema: type, root: str) -> CommandLine:
    """Command line for Hydra from ``argv`` (without the program's name), for the program with this schema and root YAML.

    If a key is given several times, the last value is used. Raises ConfigError with one line for each invalid argument.
    """
    given, words = _split(argv)
    flags, notes = _with_known_configs(given, root)
    keys, names = keys_of(schema), compat()
    directories = [CONFIG_DIR, *(Path(value) for flag, value in pairwise(flags) if flag in CONFIG_DIRECTORY)]

    def is_group(key: str) -> bool:
        """Whether ``key=...`` selects an option of a group or configures Hydra itself, and is not a key of the schema."""
        return re.match(r"hydra($|[./])", key) is not None or any((directory / key).is_dir() for directory in directories)

    own_root = any(flag in CONFIG_NAME for flag in flags)

    def recipe_group(options: str) -> str:
        """The group of Hydra's that has these options, joined by commas, of ``recipe``."""
        in_directory = any(
            (directory / "recipe" / f"{option}.yaml").is_file() for directory in directories[1:] for option in options.split(",")
        )
        return next((group for group in groups_of(root) if shown(group) == "recipe" and not in_directory), "recipe")

    problems: list[str] = []
    chosen: dict[str, re.Match[str]] = {}
    for word in _words(words, keys):
        match = OVERRIDE.fullmatch(word)
        if match is None or (match["value"] is None and match["mark"] != "~"):
            # A bare option name, such as `quickstart`, most likely lacks its group: suggest recipe=quickstart.
            options = [f"{shown(group)}={word}" for group in groups_of(root) if (CONFIG_DIR / group / f"{word}.yaml").exists()]
            meant = f"; did you mean {options[0]}?" if options else "" if word in keys.leaves else keys.did_you_mean(word)
            problems.append(f"{word}: an override is key=value{meant or '; give it a value'}")
            continue
        key = match["key"] if is_group(match["key"]) else names.rename(match["key"], keys)
        if key == "recipe":
            key = recipe_group(match["value"] or "")
        elif key != shown(key):
            notes.append(f"{key} is called {shown(key)} in every program: {shown(key)}={match['value']}")
        name = key + (match["package"] or "")
        # Remove an earlier value first, so that the key also takes the position of its last occurrence.
        chosen.pop(name, None)
        chosen[name] = match

    def typed_value(name: str) -> Any:
        return parsed(name, chosen[name]["value"]) if name in chosen else None

    ahead = generation_ahead(chosen, typed_value, keys)
    problems += ahead.problems
    overrides: dict[str, str] = {}
    typed: set[str] = set()
    translated: dict[str, Replacement] = {}
    for name, match in chosen.items():
        if name in ahead.replaces:
            continue
        if secrets := list(secrets_in(name, _as_value(match["value"]))):
            problems += [f"{key}: {TYPED_SECRET}" for key in secrets]
            continue
        mark = match["mark"] or ""
        tail = "" if match["value"] is None else f"={match['value']}"
        if name in keys.leaves and bare_type(keys.leaves[name]) is str and not {*"([{'\"\\$"} & {*tail}:
            # Two bounds of a rollout correction, a date, a version: without quotes Hydra parses 0.5_5 as 0.55, 1.10 as 1.1.
            words = tail.removeprefix("=").split(",")
            tail = tail and "=" + ",".join(f"'{word}'" if _is_another_number(word) else word for word in words)
        if is_group(match["key"]):
            # Hydra refuses + for a group of the defaults list and requires it for any other group.
            group = name.partition("@")[0]
            # A directory's own recipes of a program whose built-in ones are another group of Hydra's.
            appended = group == "recipe" and not own_root and group not in groups_of(root)
            overrides[name] = ("" if group in groups_of(root) and mark != "~" else mark or "+" * appended) + name + tail
        elif _sets_nothing(name, match["key"] + (match["package"] or ""), match["value"], keys):
            notes.append(f"{match['key']}=null is left out: it has no effect")
        elif keys.knows(name) and not names.is_translated(name, match["value"], keys):
            overrides[name] = ("~" if mark == "~" else "++" if keys.is_free_form(name) else "") + name + tail
            typed.add(name)
            if (differs := names.differs(name, partial(typed_value, name))) is not None:
                notes.append(differs)
        else:
            try:
                translated[name] = names.instead(name, parsed(name, match["value"]), keys, typed_value)
            except ConfigError as error:
                problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    # Translated keys come last: whether they apply depends on all other keys of the command line.
    assigned: set[str] = set()
    for replacement in translated.values():
        note, values = replacement.over(typed)
        notes.append(note)
        assigned |= {*values}
        for name, value in values.items():
            # The comma of the resolver ${share:...} needs quotes in Hydra's grammar.
            quote = "'" if "${share:" in str(value) else ""
            overrides[name] = f"{name}={quote}{as_typed(value)}{quote}"
    notes += ahead.notes
    for name, value in ahead.sets.items():
        overrides[name] = f"{'++' if keys.is_free_form(name) else ''}{name}={written(value, PLAIN)}"
    # A user's YAML may have the same foreign keys, or others that set the same keys.
    foreign = frozenset({*translated} | assigned | {name for name in chosen if name in ahead.replaces})
    return CommandLine(tuple(flags), tuple(overrides.values()), frozenset(typed), tuple(notes), foreign)


def normalise_tree(
    tree: Mapping[str, Any], schema: type, typed: Collection[str] = (), typed_foreign: Collection[str] = ()
) -> tuple[dict[str, Any], list[str]]:
    """Normalize a composed but unresolved tree, which contains the keys of a user's YAML; returns the tree and warnings.

    typed, typed_foreign: see CommandLine; they take precedence over aliases and foreign keys in the YAML. Raises ConfigError with
    one line for each invalid key.
    """
    keys, names = keys_of(schema), compat()
    native: dict[str, Any] = {}
    foreign: dict[str, Any] = {}
    for key, value in _leaves(tree, keys):
        name = names.rename(key, keys)
        if name == key and keys.knows(key) and not names.takes_text(key, value):
            native[key] = value
        elif keys.knows(name) or name not in typed_foreign:
            foreign[name] = value
    notes: list[str] = []
    problems: list[str] = []
    ahead = generation_ahead({*foreign, *typed}, {**native, **foreign}.get, keys)
    problems += ahead.problems
    aliases: dict[str, Any] = {}
    to_translate: dict[str, Any] = {}
    for name, value in foreign.items():
        is_text = names.takes_text(name, value)
        if name in ahead.replaces or (name in typed and not (is_text and keys.knows(name))):
            continue
        if is_text or not keys.knows(name):
            to_translate[name] = value
        elif not _sets_nothing(name, "", value, keys):
            aliases[name] = value
    native |= aliases
    # After the aliases, whose values stay: the order of a YAML's keys has no meaning.
    for name, value in to_translate.items():
        try:
            note, values = names.instead(name, value, keys, native.get).over({*typed, *typed_foreign, *aliases})
        except ConfigError as error:
            problems.append(str(error))
            continue
        notes.append(note)
        native |= values
    if problems:
        raise ConfigError("\n".join(problems))
    notes += ahead.notes
    native = {name: value for name, value in native.items() if name not in ahead.replaces} | ahead.sets
    nested: dict[str, Any] = {}
    for name, value in native.items():
        *path, last = name.split(".")
        node = nested
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return nested, notes


def shown(group: str) -> str:
    """Name of a group on the command line: recipes of all programs are called recipe, and are different groups of Hydra's."""
    return "recipe" if group.endswith("_recipe") else group


@cache
def groups_of(root: str) -> tuple[str, ...]:
    """Groups of a root YAML, in the order of its defaults list."""
    return tuple(name for entry in read_yaml(CONFIG_DIR / f"{root}.yaml")["defaults"] if entry != "_self_" for name in entry)


@cache
def configs_of(root: str) -> tuple[str, ...]:
    """Names of the complete configurations of a program: its root YAML and the YAML files that extend it."""
    trees = {file.stem: read_yaml(file) for file in sorted(CONFIG_DIR.glob("*.yaml"))}
    return (root, *(name for name, tree in trees.items() if root in tree.get("defaults", ())))


def _split(argv: Sequence[str]) -> tuple[list[tuple[str, ...]], list[str]]:
    """Split arguments, in any order, into Hydra's flags, (flag,) or (flag, value), and overrides."""
    flags: list[tuple[str, ...]] = []
    words: list[str] = []
    waiting = list(argv)
    while waiting:
        word = waiting.pop(0)
        flag, equals, value = word.partition("=")
        if not word.startswith("-"):
            words.append(word)
        elif flag in FLAGS_WITH_VALUE and (equals or waiting):
            flags.append((flag, value if equals else waiting.pop(0)))
        elif flag in INFO_FLAGS:
            is_given = waiting and re.fullmatch(r"[a-z-]+", waiting[0])
            flags.append((flag, value if equals else waiting.pop(0) if is_given else "all"))
        elif word in FLAGS:
            flags.append((word,))
        elif equals:
            raise ConfigError(f"{word}: overrides have no dashes; use {word.lstrip('-')}")
        else:
            near = did_you_mean(word, FLAGS | FLAGS_WITH_VALUE | INFO_FLAGS) or "; leave it out, --help lists the flags"
            raise ConfigError(f"{word}: unknown flag{near}")
    return flags, words


def _words(words: Sequence[str], keys: Keys) -> Iterator[str]:
    """Expand foreign keys with a mapping value, node={a: 1, b: 2}, into one override per key, so that each is translated."""
    for word in words:
        match = OVERRIDE.fullmatch(word)
        value = None if match is None else _as_value(match["value"])
        if match is None or not isinstance(value, dict) or not value or keys.knows(compat().rename(match["key"], keys)):
            yield word
            continue
        below = [f"{match['mark'] or ''}{match['key']}.{name}={written(inner)}" for name, inner in value.items()]
        yield from _words(below, keys)


def _with_known_configs(flags: Sequence[tuple[str, ...]], root: str) -> tuple[list[str], list[str]]:
    """Words of ``flags``, adapted from scripts of other systems, and warnings.

    --config-path becomes --config-dir, so that the configurations of this package stay available, and known configuration names
    are translated. A directory without the configuration (such as verl's own) is dropped. Raises ConfigError if the configuration
    does not exist anywhere.
    """
    rest: list[str] = []
    notes: list[str] = []
    path = name = None
    for flag, *value in flags:
        if flag in CONFIG_PATH:
            (path,) = value
        elif flag in CONFIG_NAME:
            name = value[0].removesuffix(".yaml")
        elif flag in CONFIG_DIRECTORY and Path(value[0]).parts[-2:] == VERL_DIRECTORY and not Path(value[0]).is_dir():
            notes.append(f"--config-dir={value[0]} is left out: it is verl's own directory and does not exist here")
        else:
            rest += [flag, *value]
    stem, known = name or root, configs_of(root)
    is_address = path is not None and "://" in path
    has_it = path is not None and (is_address or Path(path, f"{stem}.yaml").is_file())
    if path is not None and not has_it and compat().configs.get(stem, stem) not in known:
        raise ConfigError(
            f"--config-path={path}: it contains no {stem}.yaml; built-in configurations, which need no path: {', '.join(known)}"
        )
    if path is not None and has_it:
        directory = path if is_address else str(Path(path).absolute())
        rest += ["--config-path" if is_address or stem in known else "--config-dir", directory]
    if name is not None:
        is_external = has_it or any(flag in CONFIG_DIRECTORY for flag in rest)
        rest += ["--config-name", stem if is_external else compat().configs.get(stem, stem)]
    return rest, notes


def _as_value(text: str | None) -> Any:
    """A mapping or list as parsed by Hydra; any other text unchanged."""
    with suppress(ConfigError):  # a syntax error is reported when Hydra parses the override
        return parsed("value", text) if text is not None and text.startswith(("{", "[")) else text
    return text


def _is_another_number(word: str) -> bool:
    """Whether ``word`` is a number that is written otherwise when it is text again."""
    if word != word.strip():
        return False
    for kind in (int, float):
        with suppress(ValueError):
            return str(kind(word)) != word
    return False


def _sets_nothing(name: str, typed: str, value: Any, keys: Keys) -> bool:
    """Whether this is an alias set to null although the key itself does not allow null, as verl's YAML has for older names."""
    annotation = keys.annotation(name)
    return name != typed and value in (None, "null") and annotation is not None and not takes_null(annotation)


def _leaves(tree: Mapping[str, Any], keys: Keys, prefix: str = "") -> list[tuple[str, Any]]:
    """(dotted key, value) of all leaves of ``tree``; a leaf of the schema, such as a free-form dict, is not descended into."""
    found: list[tuple[str, Any]] = []
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and (key not in keys.leaves or followed(keys.leaves[key]) is not None):
            found += _leaves(value, keys, f"{key}.")
        else:
            found.append((key, value))
    return found
