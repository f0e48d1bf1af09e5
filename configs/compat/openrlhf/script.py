"""Translate a command line of OpenRLHF to a bash script: a comment per flag, then the command."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, get_args, get_origin

from configs.base.keys import CONFIG_DIR, ConfigError, bare_type, keys_of
from configs.compat.openrlhf.rules import CONVERSIONS, RULES, Entry, implied, mapped, none, unused_prefixes
from configs.compat.openrlhf.table import Arguments, Flag, Settings, Table, read
from configs.compat.translate import read_yaml, written
from configs.schema.generation import GenerationConfig
from configs.schema.ppo import PPOConfig
from configs.schema.supervised import DPOConfig, RewardModelConfig, SFTConfig

SCHEMAS: Mapping[str, type] = {
    "ppo_trainer": PPOConfig,
    "sft_trainer": SFTConfig,
    "reward_model_trainer": RewardModelConfig,
    "dpo_trainer": DPOConfig,
    "generation": GenerationConfig,
}
"""Schemas of the counterparts, by their root YAML."""
VERDICTS = {"mapped": "mapped", "implied": "implied", "none": "no counterpart", "idle": "no use"}
PLAIN = re.compile(r"[A-Za-z0-9_./~:@%+-]+")  # values that Hydra reads as a single word without quotes


def script(words: Sequence[str], table: Table) -> str:
    """Translate a command line of OpenRLHF to a script. Raises ConfigError with a line for each error."""
    arguments = read(words, table)
    source = arguments.source
    keys, native = keys_of(SCHEMAS[source.root]).leaves, _defaults(source.root)
    typed, absent = _entries(arguments)

    def assigned(settings: Settings) -> list[str]:
        return [_override(key, value, keys.get(key, Any)) for key, value in settings.items()]

    settings = {key: value for entry in typed for key, value in entry.settings.items()}
    # Flags on the command line take precedence. A default of OpenRLHF is written only if the default here differs.
    defaults = []
    for entry in absent:
        differ = {
            key: value
            for key, value in entry.settings.items()
            if key not in settings and not (key in native and _comparable(native[key]) == _comparable(value))
        }
        if differ:
            settings |= differ
            flags = ", ".join(_flag(name, arguments) for name in entry.flags if arguments.words(name))
            missing = ", ".join(f"--{arguments.spelt(name)}" for name in entry.flags)
            cause = flags or (f"without {missing}" if missing else "always")
            defaults.append(f"# {cause}: {' '.join(assigned(differ))}{f' ({entry.remark})' if entry.remark else ''}")
    comments = []
    for entry in typed:
        flags = ", ".join(_flag(name, arguments) for name in entry.flags if arguments.has(name))
        changed = " ".join(assigned(entry.settings))
        if entry.kind == "mapped":
            comments.append(f"# {flags}: mapped: {changed}{f' ({entry.remark})' if entry.remark else ''}")
        else:
            comments.append(f"# {flags}: {VERDICTS[entry.kind]}: {entry.remark}{f': {changed}' if changed else ''}")
    lines = [
        f"# OpenRLHF's {source.name}, as {source.program} (docs/coming_from_openrlhf.md)",
        "#",
        *comments,
        "#",
        "# OpenRLHF's defaults for absent flags, where they differ from the defaults here:",
        *defaults,
    ]
    command = [f"python -m {source.program}", *map(shlex.quote, assigned(settings))]
    return "\n".join([*map(_one_line, lines), " \\\n    ".join(command)])


def _entries(arguments: Arguments) -> tuple[list[Entry], list[Entry]]:
    """Entries of flags on the command line, and of OpenRLHF's behaviour without a flag.

    Raises ConfigError with a line for each problem.
    """
    source = arguments.source
    unused = unused_prefixes(arguments) if source.root == "ppo_trainer" else {}
    problems: list[str] = []
    typed: list[Entry] = []
    absent = [mapped((), settings, why) for why, settings in source.always]
    done: set[tuple[str, str]] = set()
    # Flags on the command line first, in their order, so that the comments of the script follow it; then absent flags.
    for name in [*arguments.typed, *(name for name in source.flags if not arguments.has(name))]:
        head = source.flags[source.flags[name].part_of or name]
        # A rule, or a flag with its parts, is translated once, at the first flag of it.
        unit = (head.rule, "" if head.rule else head.name)
        if unit in done:
            continue
        done.add(unit)
        try:
            found = list(_translated(head, arguments))
        # Collected, so that one call reports all problems of a command line.
        except ConfigError as error:
            problems.append(str(error))
            continue
        for entry in found:
            (typed if any(map(arguments.has, entry.flags)) else absent).append(_without(entry, unused))
    if problems:
        raise ConfigError("\n".join(problems))
    return typed, [entry for entry in absent if entry.kind == "mapped"]


def _translated(flag: Flag, arguments: Arguments) -> Iterator[Entry]:
    """Translate a flag with its parts, by its rule or its fields in configs/openrlhf.yaml."""
    parts = arguments.source.parts(flag.name)
    is_set = arguments.has(flag.name) if flag.takes == 0 else bool(arguments.text(flag.name))
    if not is_set and (typed := [part.name for part in parts if arguments.has(part.name)]):
        yield none(typed, f"it belongs to {flag.name}")
    if flag.rule:
        yield from RULES[flag.rule](arguments)
    elif not parts:
        yield from _plain(flag, arguments)
    elif is_set:
        found = [entry for one in (flag, *parts) for entry in _plain(one, arguments)]
        settings = {key: value for entry in found for key, value in entry.settings.items()}
        names = [name for entry in found for name in entry.flags]
        yield mapped(names, settings, "; ".join(entry.remark for entry in found if entry.remark))


def _plain(flag: Flag, arguments: Arguments) -> Iterator[Entry]:
    """Translate a flag by its fields. Raises ConfigError for an unknown value."""
    name, typed, words = flag.name, arguments.has(flag.name), arguments.words(flag.name)
    if not typed and not words:
        if flag.absent and flag.is_of(arguments.newer):
            yield mapped((name,), flag.absent)
    elif flag.values is not None and words[0] in flag.values:
        settings = flag.values[words[0]]
        yield mapped((name,), settings, flag.remarks.note) if settings else implied((name,), flag.remarks.implied)
    elif flag.values is not None and not flag.remarks.none:
        raise ConfigError(f"--{arguments.spelt(name)} {words[0]}: is none of {', '.join(flag.values)}")
    elif flag.remarks.none:
        yield none((name,), flag.remarks.none)
    elif flag.remarks.implied:
        yield implied((name,), flag.remarks.implied)
    else:
        value: Any = words[0] if flag.takes == 1 else list(words)
        note = flag.remarks.note
        if flag.convert:
            value, remark = CONVERSIONS[flag.convert](flag, arguments)
            note = remark or note
        settings = dict.fromkeys(flag.to, value) | dict(zip(flag.spread, words, strict=False)) | dict(flag.also)
        yield mapped((name,), settings, note)


def _without(entry: Entry, unused: Mapping[str, str]) -> Entry:
    """Remove keys of models that the run does not have; an entry without remaining keys becomes idle."""
    left = {key: value for key, value in entry.settings.items() if not key.startswith(tuple(unused))}
    if left or not entry.settings:
        return replace(entry, settings=left)
    first = next(iter(entry.settings))
    return Entry(entry.flags, "idle", next(why for prefix, why in unused.items() if first.startswith(prefix)))


def _override(key: str, value: Any, annotation: Any) -> str:
    """``key=value`` in Hydra's override syntax. Raises ConfigError if the value does not fit the key's type."""
    kind = bare_type(annotation)
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if isinstance(value, str) and kind in (int, float):
        try:
            number = float(value)
        except ValueError as error:
            raise ConfigError(f"{key}={value}: must be a number") from error
        if kind is int and number != int(number):
            raise ConfigError(f"{key}={value}: must be a whole number")
        value = str(int(number)) if kind is int else value  # 1e8 is accepted as 100000000
    return f"{key}={written(value, PLAIN)}"


def _comparable(value: Any) -> Any:
    """``value`` with numbers and texts of numbers converted to float, for comparison of YAML values and command-line words."""
    if isinstance(value, list):
        return [_comparable(item) for item in value]
    if isinstance(value, bool) or value is None:
        return value
    try:
        return float(value)
    except (TypeError, ValueError):
        return value


def _flag(name: str, arguments: Arguments) -> str:
    """A flag with its values, quoted for the shell; values of secrets are replaced by ***."""
    words = ("***",) if arguments.source.flags[name].secret else arguments.words(name)
    return shlex.join([f"--{arguments.spelt(name)}", *words])


def _one_line(text: str) -> str:
    """Escape line breaks and control characters."""
    # A line break in a value would end the comment, and bash would run the rest of the value as a command.
    return re.sub(r"[^\x20-\x7e\xa0-\u2027\u202a-\U0010ffff]", lambda odd: repr(odd[0])[1:-1], text)


def _defaults(root: str) -> dict[str, Any]:
    """{dotted key: value} of a root YAML, interpolations unresolved."""
    found: dict[str, Any] = {}

    def walk(node: Mapping[str, Any], prefix: str) -> None:
        for name, value in node.items():
            found[f"{prefix}{name}"] = value
            if isinstance(value, dict):
                walk(value, f"{prefix}{name}.")

    walk(read_yaml(CONFIG_DIR / f"{root}.yaml"), "")
    return found
