"""The points of a sweep: one job each, in this process or, by another of Hydra's launchers, in one that shares its directory."""

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

from configs.locks import locked

Status = Literal["finished", "interrupted", "failed", "not started"]
Value = float | Literal["interrupted"] | None
"""What a job returns to the sweeper: trainer.objective, larger is better; None: there is none, or it failed."""
INTERRUPTED: Literal["interrupted"] = "interrupted"
POINTS = "points"
SWEEP_LOCK = "sweep.lock"  # not a run's: a point may be in the sweep's own directory


@dataclass(frozen=True, slots=True)
class Point:
    """number: of the job, from 0. overrides: those that the sweep sets. alone: a Slurm job of its own, which a signal to another
    does not concern. requeued: one that may begin again, when its time is over and its run is not."""

    number: int
    overrides: tuple[str, ...]
    sweep_dir: Path
    alone: bool = False
    requeued: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """How a point ended. code: as of a program of its own. seconds: of the start that ended it."""

    number: int
    overrides: Sequence[str]
    status: Status
    code: int
    objective: float | None
    seconds: float


def swept(typed: Sequence[str], words: Sequence[str]) -> tuple[str, ...]:
    """Of a job's overrides those that the sweep sets. typed: the command line's."""
    parsed = OverridesParser.create().parse_overrides(list(typed))
    fixed = {override.get_key_element() for override in parsed if not override.is_sweep_override()}
    return tuple(text for text in words if text.partition("=")[0] not in fixed)


def write_result(point: Point, result: Result) -> None:
    """Whole or absent: others may read it meanwhile."""
    folder = point.sweep_dir / POINTS
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{point.number}.json.partial"
    partial.write_text(json.dumps(asdict(result)))
    partial.replace(folder / f"{point.number}.json")


def read_results(sweep_dir: Path) -> list[Result]:
    """Of the sweep's last start, by number."""
    found = [Result(**json.loads(path.read_text())) for path in (sweep_dir / POINTS).glob("*.json")]
    return sorted(found, key=lambda result: result.number)


class SweepInUse(BaseException):
    """Another process sweeps in this directory. No Exception: Hydra makes warnings of those that a callback raises."""


class SweepStart(Callback):
    """Hydra calls it where a sweep is started, which may be another process than those of its jobs. held: of that process; what
    it enters stays until the sweep has ended."""

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
