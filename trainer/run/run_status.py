"""Final status of a run: read and write it, check that a directory belongs to a configuration, and get the objective's value."""

from __future__ import annotations

import hashlib
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
    EXPORTED,
    GLOBAL_STEP,
    LATEST,
    OUTCOME,
    checkpoint_steps,
    leaves_of,
    read_config,
    read_metrics,
    redact,
    write_atomic,
)

MARK = ".exported_by"
"""In the directory of an exported model: which run it is of."""

# Keys that control how a run is started, monitored and evaluated. They do not identify the run: two configurations that differ
# in these keys only are the same run. A name that ends in a dot stands for all keys below it.
NOT_THE_RUN = (
    "trainer.default_local_dir", "trainer.resume_mode", "trainer.max_restarts", "trainer.walltime", "trainer.watch.",
    "trainer.project_name", "trainer.experiment_name",
    "trainer.export_dir", "trainer.rollout_data_dir",
    "trainer.logger", "trainer.objective", "trainer.dry_run", "trainer.full_traceback", "trainer.private",
    "timeouts.", "ray_kwargs.",
)  # fmt: skip


DEFAULTS_BEFORE = {"critic.model.path": "/models/deepseek-llm-7b-chat"}
"""{key: end of its default in earlier versions} of keys whose default now follows another key."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Recorded end of a run. seconds: duration of the process that ended with ``status``."""

    status: Status
    seconds: float


def write_outcome(run_dir: Path, status: Status, seconds: float) -> None:
    write_atomic(run_dir / OUTCOME, json.dumps({"status": status, "seconds": round(seconds, 3)}))


def earlier_outcome(run_dir: Path, config: Mapping[str, Any]) -> Outcome | None:
    """Outcome of the run with this configuration in ``run_dir``, None if no run has started there.

    A run without a recorded outcome counts as interrupted. Raises ValueError if the directory holds a run with another
    configuration; the message names the first key that differs.
    """
    if not (run_dir / CONFIG).exists():
        return None
    before = leaves_of(read_config(run_dir))
    # The same round trip through YAML as that of the file: tuples become lists and secrets stars, so equal values compare equal.
    now = leaves_of(yaml.safe_load(yaml.safe_dump(redact(config))))
    for key in sorted(before.keys() | now.keys()):
        is_ignored = any(key == name or (name.endswith(".") and key.startswith(name)) for name in NOT_THE_RUN)
        is_ignored |= key in DEFAULTS_BEFORE and before.get(key, "").endswith(f'{DEFAULTS_BEFORE[key]}"')
        if before.get(key) != now.get(key) and not is_ignored:
            raise ValueError(
                f"{run_dir} holds a run with {key}={before.get(key, '(not set)')}, not {now.get(key, '(not set)')}: take another "
                "trainer.default_local_dir, or trainer.resume_mode=disable, which moves that run aside"
            )
    return read_outcome(run_dir) or Outcome("interrupted", 0.0)


def ended_with(run_dir: Path, config: Mapping[str, Any]) -> int | None:
    """Last step of the run with this configuration if it is finished and its last checkpoint is of that step.

    None if steps remain, if the configuration has changed, or if the user selected an earlier checkpoint.
    """
    try:
        before = earlier_outcome(run_dir, config)
    except ValueError:  # another configuration, such as one with more steps, may continue from where this one ended
        return None
    if before is None or before.status != "finished" or not (run_dir / LATEST).exists():
        return None
    step = int(last_metrics(run_dir).get(GLOBAL_STEP, 0))
    latest = (run_dir / LATEST).read_text(errors="replace").strip()
    return step if latest == str(step) and step in checkpoint_steps(run_dir) else None


def read_outcome(run_dir: Path) -> Outcome | None:
    """Outcome of a run that has started, None if it is still running or was killed."""
    if not (run_dir / OUTCOME).exists():
        return None
    return Outcome(**json.loads((run_dir / OUTCOME).read_text()))


def objective_of(run_dir: Path, objective: str) -> float:
    """Value of trainer.objective of the run that ended in ``run_dir``; larger is better, a leading minus changes the sign.

    Raises ValueError if no step measured the metric.
    """
    name, sign = objective.removeprefix("-"), -1.0 if objective.startswith("-") else 1.0
    metrics = last_metrics(run_dir)
    if name not in metrics:
        raise ValueError(f"trainer.objective={objective}: the run in {run_dir} has no such metric{did_you_mean(name, metrics)}")
    return sign * metrics[name]


def last_metrics(run_dir: Path) -> dict[str, float]:
    """Last value of each metric, also of those that the last step does not have."""
    return {name: value for entry in read_metrics(run_dir) for name, value in entry.items()}


def has_exported(trainer: Mapping[str, Any]) -> bool:
    """Whether no model is to be exported, or this run's is there: otherwise a finished run exports it again.

    Of a run of an earlier version, which recorded no export, any model counts.
    """
    if trainer.get("export_dir") is None:
        return True
    target, record = Path(trainer["export_dir"]).expanduser(), Path(trainer["default_local_dir"]) / EXPORTED
    if not target.is_dir() or not any(target.iterdir()):
        return False
    if not record.exists():
        return True
    mark = target / MARK
    return mark.exists() and mark.read_text(encoding="utf-8") == record.read_text(encoding="utf-8") != ""


def record_export(run_dir: Path, export_dir: str | None) -> None:
    """Record, in the directories of the run and of the model, that the run has ended and exported it; None: it exported none."""
    digest = hashlib.blake2b((run_dir / CONFIG).read_bytes(), digest_size=16).hexdigest()
    if export_dir is not None:
        write_atomic(Path(export_dir).expanduser() / MARK, digest)
    write_atomic(run_dir / EXPORTED, "" if export_dir is None else digest)
