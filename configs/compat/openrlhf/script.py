"""Render a translation as a bash script: a comment per flag, then the command."""

import re
import shlex
from collections.abc import Sequence
from typing import Any

from configs.compat.openrlhf import placement, rules_algorithm, rules_data, rules_run
from configs.compat.openrlhf.arguments import Arguments, read
from configs.compat.openrlhf.entries import Entry, Rule, translate
from configs.compat.openrlhf.placement import useless
from configs.compat.openrlhf.settings import Ours
from configs.compat.openrlhf.table import Settings, Table

RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        placement.placement,
        placement.sleep,
        rules_algorithm.correction,
        rules_algorithm.critic,
        rules_algorithm.filtering,
        rules_algorithm.kl,
        rules_algorithm.overlong,
        rules_algorithm.rewards,
        rules_algorithm.warmup,
        rules_data.answered_files,
        rules_data.answered_samples,
        rules_data.columns,
        rules_data.held_out,
        rules_data.lengths,
        rules_data.prompt_files,
        rules_data.ptx,
        rules_data.training_files,
        rules_data.training_samples,
        rules_data.validation,
        rules_run.batches,
        rules_run.checkpoints,
        rules_run.ema,
        rules_run.engine,
        rules_run.loggers,
        rules_run.micro_batches,
        rules_run.ppo_schedule,
        rules_run.schedule,
        rules_run.task,
    )
}
"""Rules by their names in configs/openrlhf.yaml."""
VERDICTS = {"mapped": "mapped", "implied": "implied", "none": "no counterpart", "idle": "no use"}


def script(words: Sequence[str], table: Table) -> str:
    """Translate a command line of OpenRLHF to a script. Raises ConfigError with a line for each error."""
    arguments = read(words, table)
    source = arguments.source
    ours = Ours(source.root)
    found = translate(arguments, RULES, useless(arguments) if source.root == "ppo_trainer" else {})
    settings: dict[str, Any] = {}
    for entry in found.typed:
        settings |= entry.settings
    # Flags on the command line take precedence. A default of OpenRLHF is written only if the default here differs.
    defaults = []
    for entry in found.defaults:
        differ = {key: value for key, value in entry.settings.items() if key not in settings and not ours.is_default(key, value)}
        if differ:
            settings |= differ
            defaults.append(_default(entry, differ, arguments, ours))
    lines = [
        f"# OpenRLHF's {source.name}, as {source.program} (docs/coming_from_openrlhf.md)",
        "#",
        *(_comment(entry, arguments, ours) for entry in found.typed),
        "#",
        "# What OpenRLHF does where no flag says anything, if our defaults are others:",
        *defaults,
    ]
    command = [f"python -m {source.program}", *(shlex.quote(ours.word(key, value)) for key, value in settings.items())]
    return "\n".join([*map(_one_line, lines), " \\\n    ".join(command)])


def _comment(entry: Entry, arguments: Arguments, ours: Ours) -> str:
    """Comment line of an entry: flags as typed, verdict, reason or remark."""
    flags = ", ".join(_flag(name, arguments) for name in entry.flags if arguments.has(name))
    keys = _words(entry.settings, ours)
    if entry.kind == "mapped":
        return f"# {flags}: mapped: {keys}{f' ({entry.said})' if entry.said else ''}"
    return f"# {flags}: {VERDICTS[entry.kind]}: {entry.said}{f': {keys}' if keys else ''}"


def _default(entry: Entry, settings: Settings, arguments: Arguments, ours: Ours) -> str:
    """Comment line of a default of OpenRLHF that differs from the default here."""
    flags = ", ".join(_flag(name, arguments) for name in entry.flags if arguments.words(name))
    without = f"without {', '.join(f'--{arguments.spelt(name)}' for name in entry.flags)}" if entry.flags else "always"
    return f"# {flags or without}: {_words(settings, ours)}{f' ({entry.said})' if entry.said else ''}"


def _words(settings: Settings, ours: Ours) -> str:
    return " ".join(ours.word(key, value) for key, value in settings.items())


def _flag(name: str, arguments: Arguments) -> str:
    """A flag with its values, quoted for the shell; values of secrets are replaced by ***."""
    words = ("***",) if arguments.source.flags[name].secret else arguments.words(name)
    return shlex.join([f"--{arguments.spelt(name)}", *words])


def _one_line(text: str) -> str:
    """Escape line breaks and control characters."""
    # A line break in a value would end the comment, and bash would run the rest of the value as a command.
    return re.sub(r"[^\x20-\x7e\xa0-\u2027\u202a-\U0010ffff]", lambda odd: repr(odd[0])[1:-1], text)
