"""Messages about the trials of a sweep: how each ended earlier, and a table at the end."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from configs.schema.common import RunConfig
from configs.sweeps.sweep_points import Point, Result
from trainer.run.run_status import Outcome, earlier_outcome, has_exported

STATUS_MESSAGES = {
    "finished": "was finished by an earlier start: it is left as it is",
    "interrupted": "was interrupted: it resumes from its last checkpoint, if it has one",
    "failed": "failed: it is tried again, from its last checkpoint, if it has one",
}


def earlier(config: Mapping[str, Any], trainer: RunConfig, point: Point) -> Outcome | None:
    """Earlier outcome of this trial, which is also printed; None: it starts anew.

    Raises ValueError if its directory has another run.
    """
    if trainer.resume_mode == "disable":
        return None
    before = earlier_outcome(Path(trainer.default_local_dir), config)
    if before is not None and before.status == "finished" and not has_exported(config["trainer"]):
        print(
            f"point {point.number} finished, and its exported model is missing, or another run's: it is exported again",
            file=sys.stderr,
        )
        return None
    if before is not None:
        print(f"point {point.number} {STATUS_MESSAGES[before.status]} ({trainer.default_local_dir})", file=sys.stderr)
    return before


def table(results: Sequence[Result]) -> list[str]:
    """One line per trial of a sweep, below a heading."""
    rows = [("point", "status", "objective", "seconds", "overrides")]
    for result in results:
        objective = "-" if result.objective is None else f"{result.objective:.6g}"
        rows.append((str(result.number), result.status, objective, f"{result.seconds:.1f}", " ".join(result.overrides)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{word:<{width}}" for word, width in zip(row, widths, strict=True)).rstrip() for row in rows]
