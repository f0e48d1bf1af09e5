"""From a command line to a checked configuration and a run: what every main_*.py shares.

Exit codes: 0, also of a run that ends for its walltime; 2 for what the user can mend, one line a problem; 3 for what a run found
to be wrong, one line each; 4 for a run that stopped because memory or disk ran short; 1 for anything else, with the traceback (of
a worker that failed, or was late, its own; none if the last checkpoint could not be written); 128 + n for signal n, such as 130
for Ctrl-C and 143 for SIGTERM.
"""

import sys
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from configs.argv import CommandLine, groups_of, normalise
from configs.checks import world_size
from configs.compose import Tree, run_jobs
from configs.keys import CONFIG_DIR, ConfigError, described
from configs.load import load
from configs.points import INTERRUPTED, Point, Result, Status, Value, read_results, write_result
from configs.schema.common import ProgramConfig, RunConfig, WorkersConfig
from configs.secret_names import hidden
from trainer.outcome import objective_of
from trainer.sweep import earlier, table
from workers.controller.group import PhaseTimeout, WorkerError


class RunnableConfig(Protocol):
    @property
    def trainer(self) -> ProgramConfig: ...


class Found(Exception):
    """The run did what it was asked to do, and found something wrong: a line for each."""


class NotSaved(Exception):
    """The run did what it was asked to do, but its end is not on disk: one line."""


class Stopped(Exception):
    """The run ended before its last step, as it was told to, and can be resumed: a line that says where."""

    def __init__(self, code: int, said: str) -> None:
        super().__init__(said)
        self.code = code


@dataclass(frozen=True, slots=True)
class Ended:
    """How a job ended. status: None of one that was only checked. objective: trainer.objective, larger is better."""

    code: int
    status: Status | None
    objective: float | None = None
    seconds: float = 0.0


Config = TypeVar("Config", bound=RunnableConfig)

HELP = """\
python -m {name} [key=value ...] [group=option ...]

{about}

Groups and recipes (a recipe is a whole experiment; what is typed by hand wins over both)
{groups}

Keys that are set most, with their defaults (all of them: configs/{root}.yaml, or --cfg job)
{keys}

Flags
  --cfg job               print the composed configuration
  --info                  print where it comes from
  --config-dir DIR        more groups and recipes; with --config-name NAME a whole configuration of your own
  -m, --multirun          a job for each of the values key=1,2, each in a run directory of its own; again: those that are left
  trainer.dry_run=config  check the configuration, start nothing

Examples
{examples}"""


@dataclass(frozen=True, slots=True)
class Program(Generic[Config]):
    """A main_*.py.

    name: its module. about: a paragraph for --help. root: its YAML in configs/. often_used: keys for --help. examples: command
    lines, less the program. check: config and typed keys to lines for the user. run: the work, given these lines; it imports
    what is heavy. Both raise ValueError or FileNotFoundError for what the user can mend; run raises Found and Stopped.
    """

    name: str
    about: str
    root: str
    schema: type[Config]
    often_used: Sequence[str]
    examples: Sequence[str]
    check: Callable[[Config, Collection[str]], list[str]]
    run: Callable[[Config, list[str]], None]

    def main(self) -> None:
        sys.exit(self(sys.argv[1:]))

    def __call__(self, argv: Sequence[str]) -> int:
        """Do what ``argv``, the words after the program's name, asks for; the exit code. Of several jobs: the highest."""
        if {"--help", "-h"} & set(argv):
            print(self.help())
            return 0
        codes: list[int] = []

        def job(tree: Tree, point: Point | None) -> Value:
            if point is not None:
                return self.point(tree, command, point)
            codes.append(self.job(tree, command).code)
            return None

        try:
            command = normalise(argv, self.schema, self.root)
            results = run_jobs(command, self.root, job)
        except ConfigError as error:
            return complain(*str(error).splitlines())
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130
        if results:
            print(*table(results), sep="\n")
        return max([*codes, *(result.code for result in results)], default=0)

    def point(self, tree: Tree, command: CommandLine, point: Point) -> Value:
        """A point of a sweep: what it tells the sweeper. After a signal to one, those that are left do not begin."""
        if any(result.code > 128 for result in read_results(point.sweep_dir)):
            ended = Ended(0, "not started")
        else:
            ended = self.job(tree, command, point)
        if ended.status is not None:
            write_result(point, Result(point.number, point.overrides, ended.status, ended.code, ended.objective, ended.seconds))
        return INTERRUPTED if ended.status in ("interrupted", "not started") else ended.objective

    def job(self, tree: Tree, command: CommandLine, point: Point | None = None) -> Ended:
        """One run; of a sweep, unless it is finished."""
        try:
            loaded = load(tree, self.schema, command.typed)
            told = [*command.notes, *loaded.notes, *self.check(loaded.config, command.typed)]
        except ValueError as error:
            return Ended(complain(*str(error).splitlines()), "failed")
        for note in told:
            print(f"note: {note}", file=sys.stderr)
        trainer = loaded.config.trainer
        if trainer.dry_run == "config":
            workers = ""
            if isinstance(trainer, WorkersConfig):
                workers = f"{world_size(trainer)} worker{'s' if world_size(trainer) > 1 else ''} on {trainer.device}, "
            print(f"configuration is fine: {workers}run directory {trainer.default_local_dir}")
            return Ended(0, None)
        began, before = time.perf_counter(), None
        status: Status
        if point is not None and isinstance(trainer, RunConfig):
            try:
                before = earlier(asdict(loaded.config), trainer, point)  # type: ignore[call-overload]
            except ValueError as error:
                return Ended(complain(str(error)), "failed")
        if before is not None and before.status == "finished":
            code, status, seconds = 0, before.status, before.seconds
        else:
            code, status = self.attempt(loaded.config, told)
            seconds = time.perf_counter() - began
        objective = None
        if status == "finished" and isinstance(trainer, RunConfig) and trainer.objective is not None:
            try:
                objective = objective_of(Path(trainer.default_local_dir), trainer.objective)
            except ValueError as error:
                code = complain(str(error))
        return Ended(code, status, objective, seconds)

    def attempt(self, config: Config, told: list[str]) -> tuple[int, Status]:
        """The work, and its exit code."""
        trainer = config.trainer
        try:
            self.run(config, told)
        except (ValueError, FileNotFoundError) as error:
            if trainer.full_traceback:
                traceback.print_exc()
            return complain(f"{' '.join(str(error).split())} (trainer.full_traceback=true shows where)"), "failed"
        except Found as error:
            complain(*str(error).splitlines())
            return 3, "failed"
        except Stopped as error:
            print(error, file=sys.stderr)
            return error.code, "interrupted"
        except (WorkerError, PhaseTimeout, NotSaved) as error:  # they say where
            if trainer.full_traceback:
                traceback.print_exc()
            print(f"error: {error}", file=sys.stderr)
            return 1, "failed"
        except Exception:
            traceback.print_exc()
            return 1, "failed"
        return 0, "finished"

    def help(self) -> str:
        said = described(CONFIG_DIR / f"{self.root}.yaml")
        groups = [
            f"  {group}={' | '.join(sorted(path.stem for path in (CONFIG_DIR / group).glob('*.yaml')))}"
            for group in groups_of(self.root)
        ]
        return HELP.format(
            name=self.name,
            about=self.about,
            root=self.root,
            groups="\n".join(groups) or "  none",
            keys="\n".join(f"  {f'{key}={said[key].value}':<66} {said[key].comment}".rstrip() for key in self.often_used),
            examples="\n".join(f"  python -m {self.name} {example}" for example in self.examples),
        )


def complain(*problems: str) -> int:
    """A line for each on stderr; the exit code of an error that the user can mend."""
    for problem in problems:
        print(f"error: {hidden(problem)}", file=sys.stderr)
    return 2
