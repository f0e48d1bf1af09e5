"""A translation as text that bash runs: a comment for each flag, and below them the command."""

import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from trainer.translate import placement, rules_algorithm, rules_data, rules_run
from trainer.translate.arguments import Arguments, read
from trainer.translate.entries import Entry, Rule, translate
from trainer.translate.ours import Ours
from trainer.translate.table import Table

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
"""By their names in configs/openrlhf.yaml."""
VERDICTS = {"mapped": "mapped", "implied": "implied", "none": "no counterpart", "idle": "no use"}


def script(words: list[str], table: Table) -> str:
    """Of a command line of OpenRLHF. Raises ConfigError with a line for each thing that is wrong."""
    arguments = read(words, table)
    source = arguments.source
    ours = Ours(source.root)
    without = placement.useless(arguments) if source.root == "ppo_trainer" else {}
    found = translate(arguments, RULES, without)
    settings: dict[str, Any] = {}
    for entry in found.typed:
        settings |= entry.settings
    differ = [(entry, {key: value for key, value in entry.settings.items() if not ours.is_default(key, value)}) for entry in found.defaults]
    lines = [f"# OpenRLHF's {source.name}, as {source.program}; docs/coming_from_openrlhf.md. Keys: configs/{source.root}.yaml", "#"]
    lines += [_comment(entry, entry.settings, arguments, ours) for entry in found.typed]
    defaults = []
    for entry, left in differ:
        new = {key: value for key, value in left.items() if key not in settings}
        if new:
            settings |= new
            defaults.append(_comment(entry, new, arguments, ours))
    lines += ["#", "# What OpenRLHF does where no flag says anything, and our defaults are others:", *defaults] if defaults else []
    command = [f"python -m {source.program}", *(shlex.quote(ours.word(key, value)) for key, value in settings.items())]
    return "\n".join([*lines, " \\\n    ".join(command)])


def _comment(entry: Entry, settings: dict[str, Any], arguments: Arguments, ours: Ours) -> str:
    """One line: the flags, what became of them, and why."""
    flags = ", ".join(_flag(name, arguments) for name in entry.flags if arguments.has(name) or not _typed(entry, arguments))
    keys = " ".join(ours.word(key, value) for key, value in settings.items())
    verdict = VERDICTS[entry.kind]
    if entry.kind == "mapped":
        text = f"mapped: {keys}" + (f" ({entry.said})" if entry.said else "")
    else:
        text = f"{verdict}: {entry.said}" + (f": {keys}" if keys else "")
    return re.sub(r"[^\x20-\x7e\xa0-\U0010ffff]", lambda odd: repr(odd[0])[1:-1], f"# {flags + ': ' if flags else ''}{text}")


def _typed(entry: Entry, arguments: Arguments) -> bool:
    return any(map(arguments.has, entry.flags))


def _flag(name: str, arguments: Arguments) -> str:
    """As it was typed; a secret's value is not shown."""
    flag = arguments.source.flags[name]
    words = ("***",) if flag.secret and arguments.words(name) else arguments.words(name)
    return shlex.join([f"--{arguments.spelt(name)}", *words])
