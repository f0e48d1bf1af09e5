"""Trials of a sweep: one job each, in this process or, with another Hydra launcher, in a process that shares the directory."""

import json
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from configs.base.locks import locked

Status = Literal["finished", "interrupted", "failed", "not started"]
Value = float | Literal["interrupted"] | None
"""Return value of a job for the sweeper: trainer.objective (larger is better); None = no objective, or the job failed."""
INTERRUPTED: Literal["interrupted"] = "interrupted"
POINTS = "points"
SWEEP_LOCK = "sweep.lock"  # differs from the lock of a run: a trial may use the sweep's own directory


@dataclass(frozen=True, slots=True)
class Point:
    """A trial of a sweep.

    number: of the job, from 0. overrides: those set by the sweep. alone: runs in its own Slurm job, so that signals to other
    trials do not affect it. requeued: Slurm restarts the job if its time ends before the run does.
    """

    number: int
    overrides: tuple[str, ...]
    sweep_dir: Path
    alone: bool = False
    requeued: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a trial. code: exit code as of a separate program. seconds: duration of the last start."""

    number: int
    overrides: Sequence[str]
    status: Status
    code: int
    objective: float | None
    seconds: float


def swept(typed: Sequence[str], words: Sequence[str]) -> tuple[str, ...]:
    """Overrides of a job (words) that are set by the sweep. typed: the overrides of the command line."""
    parsed = OverridesParser.create().parse_overrides(list(typed))
    fixed = {override.get_key_element() for override in parsed if not override.is_sweep_override()}
    return tuple(text for text in words if text.partition("=")[0] not in fixed)


def write_result(point: Point, result: Result) -> None:
    """Write a result atomically, because other processes may read it at the same time."""
    folder = point.sweep_dir / POINTS
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{point.number}.json.partial"
    partial.write_text(json.dumps(asdict(result)))
    partial.replace(folder / f"{point.number}.json")


def read_results(sweep_dir: Path) -> list[Result]:
    """Results of the sweep's last start, ordered by number."""
    found = [Result(**json.loads(path.read_text())) for path in (sweep_dir / POINTS).glob("*.json")]
    return sorted(found, key=lambda result: result.number)


class SweepInUse(BaseException):
    """Another process runs a sweep in this directory.

    A BaseException, because Hydra turns an Exception of a callback into a warning.
    """


class SweepStart(Callback):
    """Callback that locks the sweep's directory and removes old results.

    Hydra calls it in the process that starts the sweep, which may differ from those of the jobs. held: context of that process,
    closed when the sweep has ended.
    """

    directory: ClassVar[Path | None] = None
    held: ClassVar[ExitStack]

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        directory = Path(config.hydra.sweep.dir)
        try:
            SweepStart.held.enter_context(locked(directory, "trainer.default_local_dir", SWEEP_LOCK))
        except ValueError as error:
            raise SweepInUse(*error.args) from error
        SweepStart.directory = directory
        shutil.rmtree(SweepStart.directory / POINTS, ignore_errors=True)
