"""From a command line to a checked configuration and a run; shared by all main_*.py.

Exit codes: 0: success, also of a run that stops at its walltime. 1: any other error, with the traceback (that of the worker
if it failed or was late; none if the last checkpoint could not be written). 2: an error that the user can fix, one line per
problem. 3: a run found something wrong, one line per finding. 4: a run stopped because memory or disk ran short. 128 + n:
signal n, such as 130 for Ctrl-C and 143 for SIGTERM.
"""

import errno
import os
import re
import signal
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from configs.argv import CommandLine, groups_of, normalise, shown
from configs.base.keys import CONFIG_DIR, ConfigError, described, keys_of
from configs.base.locks import check_writable
from configs.base.secrets import hidden
from configs.compose import Tree, run_jobs
from configs.load import check_swept, load
from configs.required import unset_keys
from configs.schema.common import ProgramConfig, RunConfig, RunnableConfig, WorkersConfig
from configs.sweeps.sweep_points import INTERRUPTED, Point, Result, Status, Value, read_results, write_result
from configs.validation.rollout import world_size
from trainer.cli.earlier_runs import in_earlier_directory
from trainer.cli.sweep import earlier, table
from trainer.resilience.stopping import Stopping
from trainer.run.errors import CheckFailed, NotSaved, Stopped
from trainer.run.run_status import ended_with, has_exported, objective_of
from trainer.run.timing import program_began
from workers.controller.group import PhaseTimeout, WorkerError


@dataclass(frozen=True, slots=True)
class JobEnd:
    """Outcome of a job. status: None if it was only checked. objective: trainer.objective, larger is better."""

    code: int
    status: Status | None
    objective: float | None = None
    seconds: float = 0.0


Config = TypeVar("Config", bound=RunnableConfig)

HELP = """\
python -m {name} [key=value ...] [group=option ...]

{about}

Examples
{examples}

Groups: leaves that belong together; what is typed by hand wins over them
{groups}

Keys that are set most; all {count} are in configs/{root}.yaml
{keys}

Flags
  --cfg job               print the composed configuration
  --info                  print where it comes from
  --config-dir DIR        more groups and recipes; with --config-name NAME
                          a whole configuration of your own
  -m, --multirun          a job for each of key=1,2; again: those that are left
{dry_runs}"""
FULL = (errno.ENOSPC, errno.EDQUOT)
DRY_RUNS = {
    "config": "  trainer.dry_run=config  check the configuration, start nothing",
    "full": "  trainer.dry_run=full    and models, data and rewards; print the plan",
}
NOTHING_LEFT = "nothing is left to do; more steps continue from there, and trainer.resume_mode=disable starts anew"
WIDTH = 80
"""Columns of the help page."""


@dataclass(frozen=True, slots=True)
class Program(Generic[Config]):
    """A main_*.py.

    name: its module. about: paragraph for --help. root: its YAML in configs/. often_used: keys for --help. examples: command
    lines without the program. check: (config, typed keys) -> warnings for the user. run: executes the program, given these
    warnings, and imports what is heavy. inputs: problems of the files that a configuration names, one line each; evaluated
    before run. plan: executed for trainer.dry_run=full; None: the program has no plan. settle: (config, typed keys) -> the
    config with values that depend on the machine, and notes; called before check.

    check and run raise ValueError or FileNotFoundError for errors that the user can fix; run also raises CheckFailed and Stopped.
    """

    name: str
    about: str
    root: str
    schema: type[Config]
    often_used: Sequence[str]
    examples: Sequence[str]
    check: Callable[[Config, Collection[str]], list[str]]
    run: Callable[[Config, list[str]], None]
    inputs: Callable[[Config], Iterable[str]] = lambda config: ()
    plan: Callable[[Config], None] | None = None
    settle: Callable[[Config, Collection[str]], tuple[Config, list[str]]] = lambda config, typed: (config, [])

    def main(self) -> None:
        """Run with the words of the command line, and exit with the exit code."""
        program_began()
        code = self(sys.argv[1:])
        if code == 2 and not sys.argv[1:]:
            print(f"note: nothing was asked for; python -m {self.name} --help has examples", file=sys.stderr)
        sys.exit(code)

    def __call__(self, argv: Sequence[str]) -> int:
        """Execute ``argv``, the words after the program's name. Returns the exit code; of several jobs, the highest."""
        if {"--help", "-h"} & set(argv):
            print(self.help())
            return 0
        codes: list[int] = []
        # Parsed by hand: an error may occur before there is a configuration to read the flag from.
        full = any(re.fullmatch(r"\+*trainer\.full_traceback=true", word, re.IGNORECASE) for word in argv)

        Stopping.received = None  # by an earlier call
        begun: set[int] = set()  # trials in this process

        def job(tree: Tree, point: Point | None) -> Value:
            if point is not None:
                value = self.point(tree, command, point, before=begun, full_traceback=full)
                begun.add(point.number)
                return value
            codes.append(self.job(tree, command, full_traceback=full).code)
            return None

        try:
            command = normalise(argv, self.schema, self.root)
            check_swept(command.overrides, self.schema)
            results = run_jobs(command, self.root, job)
        except ConfigError as error:
            return complain(*str(error).splitlines(), full_traceback=full)
        except KeyboardInterrupt as interrupt:
            print("; ".join(["interrupted", *interrupt.args]), file=sys.stderr)
            return 130
        if results:
            print(*table(results), sep="\n")
        return max([*codes, *(result.code for result in results)], default=0)

    def point(
        self, tree: Tree, command: CommandLine, point: Point, *, before: Collection[int] = (), full_traceback: bool
    ) -> Value:
        """Execute a trial of a sweep. Returns its value for the sweeper. before: trials that this process has begun.

        After one trial was ended by a signal, or has ended when one arrived, the remaining ones do not start, unless they are
        jobs of Slurm's. Nor do those of a process whose time is up. If a trial ran out of time in a job that may start again,
        submitit requeues it: the signal that it handles for this is raised, which ends the process.
        """

        def ends_the_sweep(result: Result) -> bool:
            out_of_time = result.status == "interrupted" and result.code == 0
            return result.code > 128 or (out_of_time and result.number in before)

        received = Stopping.received
        if not point.alone and (received or any(map(ends_the_sweep, read_results(point.sweep_dir)))):
            ended = JobEnd(0 if received is None else 128 + received, "not started")
        else:
            ended = self.job(tree, command, point, full_traceback=full_traceback)
        if ended.status is not None:
            write_result(point, Result(point.number, point.overrides, ended.status, ended.code, ended.objective, ended.seconds))
        if ended.status == "interrupted" and ended.code == 0 and point.requeued:
            with suppress(RuntimeError):  # raised by submitit, also into its log, if the job was requeued often enough
                signal.raise_signal(signal.Signals[f"SIG{os.environ.get('SUBMITIT_PREEMPT_SIGNAL', 'USR2')}"])
        return INTERRUPTED if ended.status in ("interrupted", "not started") else ended.objective

    def job(self, tree: Tree, command: CommandLine, point: Point | None = None, *, full_traceback: bool) -> JobEnd:
        """Execute one job; a trial of a sweep only if it is not finished yet.

        full_traceback: as typed, for errors before a configuration exists.
        """
        before = None
        try:
            loaded = load(tree, self.schema, command.typed, command.foreign)
            run_config, earlier_notes = in_earlier_directory(loaded.config, self.root, command.typed)
            full_traceback = run_config.trainer.full_traceback
            run_config, settled = self.settle(run_config, command.typed)
            trainer = run_config.trainer
            if trainer.dry_run == "full" and self.plan is None:
                raise ConfigError(f"trainer.dry_run=full: {self.name} has no plan to show; take trainer.dry_run=config")
            warnings = [*command.notes, *loaded.notes, *earlier_notes, *settled, *self.check(run_config, command.typed)]
            for note in warnings:
                print(f"note: {note}", file=sys.stderr)
            if trainer.dry_run == "config":
                if problems := list(unset_keys(run_config, self.root)):
                    raise ConfigError("\n".join(problems))
                print(f"configuration is fine: {in_words(trainer)}run directory {trainer.default_local_dir}")
                return JobEnd(0, None)
            if trainer.dry_run is None and isinstance(trainer, RunConfig):
                config = asdict(run_config)  # type: ignore[call-overload]
                if point is not None:
                    before = earlier(config, trainer, point)
                elif (step := nothing_left(config)) is not None:
                    print(f"the run in {trainer.default_local_dir} ended with step {step}: {NOTHING_LEFT}")
                    return JobEnd(0, "finished")
            finished = before is not None and before.status == "finished"
            # A finished trial does not need its inputs any more.
            if not finished and (problems := list(self.inputs(run_config))):
                raise ConfigError("\n".join(problems))
            # Before the program imports what is heavy.
            if not finished and isinstance(trainer, RunConfig):
                check_writable(Path(trainer.default_local_dir), "trainer.default_local_dir")
        except ValueError as error:
            return JobEnd(complain(*str(error).splitlines(), full_traceback=full_traceback), "failed")
        began, code = time.perf_counter(), 0
        status: Status = "finished"
        if not finished:
            code, status = self.attempt(run_config, warnings)
        if trainer.dry_run == "full":
            return JobEnd(code, None)
        seconds = before.seconds if before is not None and finished else time.perf_counter() - began
        objective = None
        if status == "finished" and isinstance(trainer, RunConfig) and trainer.objective is not None:
            try:
                objective = objective_of(Path(trainer.default_local_dir), trainer.objective)
            except ValueError as error:
                code = complain(str(error))
        return JobEnd(code, status, objective, seconds)

    def attempt(self, config: Config, warnings: list[str]) -> tuple[int, Status]:
        """Execute the program, or its plan. Returns (exit code, status)."""
        trainer = config.trainer
        if trainer.dry_run is None and sys.stdout.isatty():  # the imports that follow take seconds
            print(f"starting, in {trainer.default_local_dir}", flush=True)
        try:
            if trainer.dry_run == "full" and self.plan is not None:
                self.plan(config)
            else:
                self.run(config, warnings)
        except (ValueError, FileNotFoundError) as error:
            where = "" if trainer.full_traceback else " (trainer.full_traceback=true shows where)"
            return complain(f"{' '.join(str(error).split())}{where}", full_traceback=trainer.full_traceback), "failed"
        except CheckFailed as error:
            complain(*str(error).splitlines())
            return 3, "failed"
        except Stopped as error:
            print(error, file=sys.stderr)
            return error.code, "interrupted"
        except (WorkerError, PhaseTimeout, NotSaved) as error:  # their messages say where
            if isinstance(error, WorkerError) and error.kind == ConfigError.__name__:
                return complain(error.message.partition(": ")[2], full_traceback=trainer.full_traceback), "failed"
            if trainer.full_traceback:
                traceback.print_exc()
            print(f"error: {error}", file=sys.stderr)
            return 1, "failed"
        except OSError as error:
            if error.errno not in FULL or trainer.full_traceback:
                traceback.print_exc()
                return 1, "failed"
            complain(
                f"{error.filename or trainer.default_local_dir}: {error.strerror}; make room there, or name another directory"
            )
            return 1, "failed"
        except Exception:
            traceback.print_exc()
            return 1, "failed"
        return 0, "finished"

    def help(self) -> str:
        """The --help page."""
        defaults = described(CONFIG_DIR / f"{self.root}.yaml")
        return HELP.format(
            name=self.name,
            about=wrapped(" ".join(self.about.split()), "", ""),
            root=self.root,
            examples="\n".join(wrapped(f"python -m {self.name} {example}", "  ", "      ", " \\") for example in self.examples),
            groups="\n".join(line for group in groups_of(self.root) for line in group_lines(group)) or "  none",
            count=len(keys_of(self.schema).leaves),
            keys="\n".join(
                f"  {key}={defaults[key].value}\n{wrapped(defaults[key].comment, '      ', '      ')}" for key in self.often_used
            ),
            dry_runs="\n".join(DRY_RUNS[kind] for kind in ("config", "full") if kind == "config" or self.plan is not None),
        )


def group_lines(group: str) -> Iterator[str]:
    """Options of a group, each with the description in the second line of its file."""
    for path in sorted((CONFIG_DIR / group).glob("*.yaml")):
        _, comment, *_ = path.read_text(encoding="utf-8").splitlines()
        yield f"  {f'{shown(group)}={path.stem}':<27}{comment.removeprefix('# ')}"


def wrapped(text: str, first: str, other: str, broken: str = "") -> str:
    """Wrap ``text`` to WIDTH columns. first, other: prefix of the first line, of others. broken: suffix of all but the last."""
    lines = textwrap.wrap(text, WIDTH - len(broken), initial_indent=first, subsequent_indent=other, break_on_hyphens=False)
    return f"{broken}\n".join(lines)


def nothing_left(config: Mapping[str, Any]) -> int | None:
    """Last step of a run that has ended, if the same command would have nothing to do; else None."""
    trainer = config["trainer"]
    if trainer["resume_mode"] != "auto" or trainer.get("val_only") or not has_exported(trainer):
        return None
    return ended_with(Path(trainer["default_local_dir"]), config)


def in_words(trainer: ProgramConfig) -> str:
    """Number and device of a program's workers, for the user; "" for a program without workers."""
    if not isinstance(trainer, WorkersConfig):
        return ""
    return f"{world_size(trainer)} worker{'s' if world_size(trainer) > 1 else ''} on {trainer.device}, "


def complain(*problems: str, full_traceback: bool = False) -> int:
    """Print one line per problem to stderr. Returns 2, the exit code of errors that the user can fix.

    full_traceback: print the traceback of the exception that is being handled first.
    """
    if full_traceback:
        print(hidden(traceback.format_exc()), end="", file=sys.stderr)
    for problem in problems:
        print(f"error: {hidden(problem)}", file=sys.stderr)
    return 2
