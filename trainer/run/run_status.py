"""How a run ended, by its directory's own record; what it reached; and whether it is the run that is asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from configs.base.keys import did_you_mean
from configs.sweeps.sweep_points import Status
from trainer.run.run_dir import (
    CONFIG,
    GLOBAL_STEP,
    LATEST,
    OUTCOME,
    checkpoint_steps,
    leaves_of,
    read_metrics,
    redact,
    write_atomic,
)

# Keys that say how a run is started, watched and judged, and not which run it is; a name that ends in a dot stands for all below.
NOT_THE_RUN = (
    "trainer.default_local_dir", "trainer.resume_mode", "trainer.max_restarts", "trainer.walltime", "trainer.watch.",
    "trainer.logger", "trainer.objective", "trainer.dry_run", "trainer.full_traceback", "timeouts.", "ray_kwargs.",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outcome:
    """seconds: of the start that ended so."""

    status: Status
    seconds: float


def write_outcome(run_dir: Path, status: Status, seconds: float) -> None:
    write_atomic(run_dir / OUTCOME, json.dumps({"status": status, "seconds": round(seconds, 3)}))


def earlier_outcome(run_dir: Path, config: Mapping[str, Any]) -> Outcome | None:
    """Of the run with this configuration in ``run_dir``; None if there is none yet.

    Raises ValueError if the run there has another configuration, with a key that differs.
    """
    if not (run_dir / CONFIG).exists():
        return None
    before = leaves_of(yaml.safe_load((run_dir / CONFIG).read_text(encoding="utf-8")))
    now = leaves_of(yaml.safe_load(yaml.safe_dump(redact(config))))
    for key in sorted(before.keys() | now.keys()):
        beside = any(key == name or (name.endswith(".") and key.startswith(name)) for name in NOT_THE_RUN)
        if before.get(key) != now.get(key) and not beside:
            raise ValueError(
                f"{run_dir} holds a run with {key}={before.get(key, '(not set)')}, not {now.get(key, '(not set)')}: take another "
                "trainer.default_local_dir, or trainer.resume_mode=disable, which moves that run aside"
            )
    return read_outcome(run_dir) or Outcome("interrupted", 0.0)


def ended_with(run_dir: Path, config: Mapping[str, Any]) -> int | None:
    """The last step of the run with this configuration, if it came to its end and its checkpoint says so too; None: some of it is
    left, or asked for again."""
    try:
        before = earlier_outcome(run_dir, config)
    except ValueError:  # another configuration may go on from where this one ended
        return None
    if before is None or before.status != "finished" or not (run_dir / LATEST).exists():
        return None
    step = int(last_metrics(run_dir).get(GLOBAL_STEP, 0))
    return step if (run_dir / LATEST).read_text().strip() == str(step) and step in checkpoint_steps(run_dir) else None


def read_outcome(run_dir: Path) -> Outcome | None:
    """Of a run that has begun; None: it was killed, or goes on."""
    if not (run_dir / OUTCOME).exists():
        return None
    return Outcome(**json.loads((run_dir / OUTCOME).read_text()))


def objective_of(run_dir: Path, objective: str) -> float:
    """trainer.objective of the run that ended in ``run_dir``: larger is better. Raises ValueError if no step measured it."""
    name, sign = objective.removeprefix("-"), -1.0 if objective.startswith("-") else 1.0
    metrics = last_metrics(run_dir)
    if name not in metrics:
        raise ValueError(f"trainer.objective={objective}: the run in {run_dir} has no such metric{did_you_mean(name, metrics)}")
    return sign * metrics[name]


def last_metrics(run_dir: Path) -> dict[str, float]:
    """The last value of each metric."""
    return {name: value for entry in read_metrics(run_dir) for name, value in entry.items()}
