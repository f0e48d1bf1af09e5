"""The run directory: what lies where, and how it is brought back to the step a run goes on from.

A run directory holds one run, and no secrets. Where we make it, it is this user's alone (mode 0700). What an earlier run, or a
branch that is left behind, wrote is moved to ``earlier_<k>/``, never deleted; lines and dumps past the step are cut: the run
writes the same ones again.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from configs.base.secrets import hidden, is_secret
from workers.controller.logs import tell

METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
EVENTS = "events.jsonl"
TIMELINE = "timeline.jsonl"
CONFIG = "config.yaml"
ENVIRONMENT = "environment.json"
REPORT = "report.html"
OUTCOME = "outcome.json"
ANSWERS = "answers.jsonl"
LOGS = "logs"
CONTROLLER_LOG = "logs/controller.log"
TENSORBOARD = "tensorboard"
ROLLOUTS = "rollouts"
SKIPPED_BATCHES = "logs/nonfinite"
WANDB_ID = "wandb_id.txt"
MLFLOW_ID = "mlflow_id.txt"
SWANLAB_ID = "swanlab_id.txt"
REMOTE = "remote_copies.json"
LATEST = "latest_checkpointed_iteration.txt"
BEST = "best_checkpointed_iteration.txt"

GLOBAL_STEP = "training/global_step"
NON_FINITE = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


def checkpoint_dir(run_dir: Path, step: int) -> Path:
    return run_dir / f"global_step_{step}"


def checkpoint_steps(run_dir: Path) -> list[int]:
    """Steps of the whole checkpoints in ``run_dir``, ascending."""
    return sorted(int(match[1]) for path in run_dir.iterdir() if (match := re.fullmatch(r"global_step_(\d+)", path.name)))


def rollouts_file(directory: Path, step: int) -> Path:
    """For people; ``batch_file`` is the same step's for a replay."""
    return directory / f"step_{step}.parquet"


def batch_file(directory: Path, step: int) -> Path:
    return directory / f"step_{step}.safetensors"


def write_atomic(path: Path, text: str) -> None:
    """The file is the old one or the new one, whenever the process or the machine dies."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    fsync_directory(path.parent)


def fsync_directory(path: Path) -> None:
    """Make renames in ``path`` last."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(root: Path) -> None:
    """Make all that lies below ``root`` last."""
    for directory, _, files in os.walk(root):
        for name in files:
            with open(os.path.join(directory, name), "rb") as file:
                os.fsync(file.fileno())
        fsync_directory(Path(directory))


def json_line(entry: dict[str, Any]) -> str:
    """One line of valid JSON. Floats read back equal to the bit; non-finite ones are the strings of NON_FINITE."""
    plain = {key: _finite_or_name(value) if isinstance(value, float) else value for key, value in entry.items()}
    return json.dumps(plain, allow_nan=False) + "\n"


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """The steps of metrics.jsonl. A torn last line is left out; raises ValueError for any other line that is no JSON."""
    return [
        {key: NON_FINITE[value] if isinstance(value, str) else value for key, value in entry.items()}
        for entry in read_lines(run_dir / METRICS)
    ]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, [] if there is none. A line without its end was torn and is left out."""
    if not path.exists():
        return []
    *lines, _torn = path.read_bytes().split(b"\n")
    entries = []
    for number, line in enumerate(lines, 1):
        try:
            entries.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
    return entries


class LineWriter:
    """The end of a file of lines. What a full disk does not take is kept, told once, and written with what comes later.

    What it took is in the kernel's hands on return.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._left = b""
        self._told = False

    def write(self, lines: str) -> None:
        self._left += lines.encode()
        try:
            while self._left:
                self._left = self._left[self._file.write(self._left) :]
        except OSError as error:
            if not self._told:
                tell(f"{self._path}: {error}; what is not written waits for room")
            self._told = True
        else:
            self._told = False

    def close(self) -> None:
        self.write("")
        self._file.close()


def redact(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy without secrets: strings under keys that end like the name of a secret, user:password@ in addresses, and what
    such variables of the environment hold, wherever it stands."""
    return {key: "***" if is_secret(key) and isinstance(value, str) else _redact_value(value) for key, value in config.items()}


def write_config(run_dir: Path, config: Mapping[str, Any], name: str = CONFIG) -> dict[str, Any]:
    """``config`` without secrets as a file of the run directory, which is there; returns what was written."""
    plain = redact(config)
    write_atomic(run_dir / name, yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))
    return plain


def leaves_of(tree: Mapping[str, Any]) -> dict[str, str]:
    """Dotted key to value as JSON. An empty mapping has none."""
    leaves: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            leaves |= {f"{key}.{below}": leaf for below, leaf in leaves_of(value).items()}
        else:
            leaves[key] = json.dumps(value)
    return leaves


def start_run(run_dir: Path, resume_step: int | None, rollout_dir: Path | None, *, restarted: bool = False) -> None:
    """Make ``run_dir`` hold this run up to ``resume_step`` (None: nothing yet), and nothing else.

    A resumed step whose checkpoint is not in ``run_dir`` comes from another run: here it starts from nothing. A
    rollout_dir outside ``run_dir`` is cut on resume; when a run starts there, its files are replaced as it goes. restarted: by
    itself, after a fall; its events tell of that, and stay.
    """
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    (run_dir / OUTCOME).unlink(missing_ok=True)
    if resume_step is None or not checkpoint_dir(run_dir, resume_step).exists():
        written = (
            METRICS, SAMPLES, TIMELINE, ANSWERS, EVENTS, REPORT, TENSORBOARD, ROLLOUTS, SKIPPED_BATCHES,
            WANDB_ID, MLFLOW_ID, SWANLAB_ID, LATEST, BEST, REMOTE,
        )  # fmt: skip
        outputs = [run_dir / name for name in written if not (restarted and name == EVENTS)]
        _set_aside(run_dir, outputs + [checkpoint_dir(run_dir, step) for step in checkpoint_steps(run_dir)])
        return
    later = [step for step in checkpoint_steps(run_dir) if step > resume_step]
    _set_aside(run_dir, [checkpoint_dir(run_dir, step) for step in later])
    write_atomic(run_dir / LATEST, str(resume_step))
    _forget_best_after(run_dir, resume_step)
    for name in (METRICS, SAMPLES, TIMELINE, ANSWERS):
        _cut_lines(run_dir / name, resume_step)
    for directory in {run_dir / ROLLOUTS, rollout_dir or run_dir / ROLLOUTS}:
        for path in _rollouts_after(directory, resume_step):
            path.unlink()


def goes_on(run_dir: Path) -> str:
    """Where the same command would take up the run, in words."""
    steps = checkpoint_steps(run_dir) if run_dir.is_dir() else []
    where = f"from {checkpoint_dir(run_dir, steps[-1])}" if steps else "from the beginning: there is no checkpoint"
    return f"with trainer.resume_mode=auto it goes on {where}"


def go_back(run_dir: Path, step: int, rollout_dir: Path | None) -> Path:
    """Move what is past ``step`` to earlier_<k>/: the run goes on from there with other data. Returns the directory.

    Other steps will be written under these numbers, so that nothing is cut here that is not kept there: lines, dumps,
    checkpoints. Which checkpoint the run goes on from is said first: a run that is killed in here resumes from it.
    """
    write_atomic(run_dir / LATEST, str(step))
    _forget_best_after(run_dir, step)
    aside = _next_aside(run_dir)
    for name in (METRICS, SAMPLES, TIMELINE, ANSWERS):
        if (run_dir / name).exists():
            left = [entry for entry in read_lines(run_dir / name) if entry[GLOBAL_STEP] > step]
            write_atomic(aside / name, "".join(json_line(entry) for entry in left))
            _cut_lines(run_dir / name, step)
    for directory in {run_dir / ROLLOUTS, rollout_dir or run_dir / ROLLOUTS}:
        for path in _rollouts_after(directory, step):
            (aside / ROLLOUTS).mkdir(exist_ok=True)
            shutil.move(path, aside / ROLLOUTS / path.name)
    checkpoints = [checkpoint_dir(run_dir, later) for later in checkpoint_steps(run_dir) if later > step]
    for path in [*checkpoints, run_dir / SKIPPED_BATCHES]:
        if path.exists():
            path.rename(aside / path.name)
    return aside


def _forget_best_after(run_dir: Path, step: int) -> None:
    """The next save names the best of those that are left."""
    if (run_dir / BEST).exists() and int((run_dir / BEST).read_text()) > step:
        (run_dir / BEST).unlink()


def _redact_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return redact(value)
    if isinstance(value, list | tuple):
        return [_redact_value(item) for item in value]
    return hidden(value) if isinstance(value, str) else value


def _finite_or_name(value: float) -> float | str:
    if value != value:
        return "NaN"
    return {float("inf"): "Infinity", float("-inf"): "-Infinity"}.get(value, value)


def _cut_lines(path: Path, step: int) -> None:
    if path.exists():
        write_atomic(path, "".join(json_line(entry) for entry in read_lines(path) if entry[GLOBAL_STEP] <= step))


def _rollouts_after(directory: Path, step: int) -> list[Path]:
    """Dumps past ``step``, and those that were never finished."""
    dump = re.compile(r"step_(\d+)\.(?:parquet|safetensors)(\.partial)?")
    found = [(path, match) for path in directory.glob("step_*") if (match := dump.fullmatch(path.name))]
    return [path for path, match in found if match[2] or int(match[1]) > step]


def _set_aside(run_dir: Path, outputs: list[Path]) -> None:
    existing = [path for path in outputs if path.exists()]
    if not existing:
        return
    aside = _next_aside(run_dir)
    for path in existing:
        path.rename(aside / path.name)
    names = ", ".join(path.name for path in existing)
    tell(f"{run_dir}: moved to {aside.name}/ what is not of this run: {names}")


def _next_aside(run_dir: Path) -> Path:
    number = 1
    while (aside := run_dir / f"earlier_{number}").exists():
        number += 1
    aside.mkdir()
    return aside
