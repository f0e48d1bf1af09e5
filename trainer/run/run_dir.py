"""The run directory: file names, atomic writes, and restoring the directory to the step from which a run resumes.

A run directory holds one run and no secrets. Its permissions follow the umask (see ``owner_only``). A run may be
killed between any two writes, and the step it resumes from is usually older than its last line of metrics. Two rules follow:

- Output of an earlier run, or of a branch abandoned by a rollback, is moved to ``earlier_<k>/`` and never deleted.
- Lines and dumps after the step of a resume are removed, because the resumed run writes the same ones again.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
START = "logs/start.json"
TENSORBOARD = "tensorboard"
ROLLOUTS = "rollouts"
SKIPPED_BATCHES = "logs/nonfinite"
WANDB_ID = "wandb_id.txt"
MLFLOW_ID = "mlflow_id.txt"
SWANLAB_ID = "swanlab_id.txt"
REMOTE = "remote_copies.json"
LATEST = "latest_checkpointed_iteration.txt"
BEST = "best_checkpointed_iteration.txt"
EXPORTED = "exported.txt"

GLOBAL_STEP = "training/global_step"
NON_FINITE = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


@contextmanager
def owner_only(private: bool) -> Iterator[None]:
    """Files and directories that are created in the block, also by child processes, are for their owner only if ``private``."""
    before = os.umask(0o077)
    os.umask(0o077 if private else before)
    try:
        yield
    finally:
        os.umask(before)


def checkpoint_dir(run_dir: Path, step: int) -> Path:
    return run_dir / f"global_step_{step}"


def checkpoint_steps(run_dir: Path) -> list[int]:
    """Steps of the complete checkpoints in ``run_dir``, ascending."""
    # A checkpoint that is being written or removed has a suffix after the number, which fullmatch rejects.
    return sorted(int(match[1]) for path in run_dir.iterdir() if (match := re.fullmatch(r"global_step_(\d+)", path.name)))


def rollouts_file(directory: Path, step: int) -> Path:
    """Parquet file with the responses of ``step``, for people; ``batch_file`` holds the same step for a replay."""
    return directory / f"step_{step}.parquet"


def batch_file(directory: Path, step: int) -> Path:
    return directory / f"step_{step}.safetensors"


def write_atomic(path: Path, text: str) -> None:
    """Replace ``path`` atomically: it holds the old text or the new one, whenever the process or the machine dies."""
    # fsync before the rename: otherwise a power cut could leave the new name with no content. fsync of the directory after it:
    # otherwise the rename itself could be lost.
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    fsync_directory(path.parent)


def fsync_directory(path: Path) -> None:
    """Make renames in the directory ``path`` durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(root: Path) -> None:
    """Make all files and directories below ``root`` durable."""
    for directory, _, files in os.walk(root):
        for name in files:
            with open(os.path.join(directory, name), "rb") as file:
                os.fsync(file.fileno())
        fsync_directory(Path(directory))


def json_line(entry: dict[str, Any]) -> str:
    """Format ``entry`` as a line of valid JSON. Floats read back bitwise identical; non-finite ones are strings (NON_FINITE)."""
    # json.dumps would write the bare words NaN and Infinity, which are not JSON and which other parsers reject.
    plain = {key: _finite_or_name(value) if isinstance(value, float) else value for key, value in entry.items()}
    return json.dumps(plain, allow_nan=False) + "\n"


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """Read the steps of metrics.jsonl. An incomplete last line is ignored; any other line that is not JSON raises ValueError."""
    return [
        {key: NON_FINITE[value] if isinstance(value, str) else value for key, value in entry.items()}
        for entry in read_lines(run_dir / METRICS)
    ]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the objects of a JSON-lines file, [] if it does not exist. A last line without newline is ignored as incomplete.

    Raises ValueError with the line number if a line is not JSON.
    """
    if not path.exists():
        return []
    # The newline is written last: a line without it is incomplete even if it happens to parse.
    *lines, _torn = path.read_bytes().split(b"\n")
    entries = []
    for number, line in enumerate(lines, 1):
        try:
            entries.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
    return entries


class LineWriter:
    """Appender to a file of lines that survives a full disk.

    What the disk does not accept stays in memory, is reported once, and is written before later lines. What it accepts has been
    passed to the kernel when ``write`` returns: the file is unbuffered.
    """

    def __init__(self, path: Path) -> None:
        """Cut off an incomplete last line of an earlier writer, which the first line written here would continue."""
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._cut()
        self._left = b""
        self._reported = False

    def write(self, lines: str) -> None:
        self._left += lines.encode()
        # A full disk may take a part of a line. Only the rest is kept, so that the next write continues in the middle of it.
        try:
            while self._left:
                self._left = self._left[self._file.write(self._left) :]
        except OSError as error:
            if not self._reported:
                tell(f"{self._path}: {error}; what is not written waits for room")
            self._reported = True
        else:
            self._reported = False

    def close(self) -> None:
        """Write what is left; what still finds no room is lost, and reported."""
        self.write("")
        if self._left:
            tell(f"{self._path}: {len(self._left):,} bytes were not written")
            self._cut()
        self._file.close()

    def _cut(self) -> None:
        written = self._path.read_bytes()
        if not written.endswith(b"\n"):
            self._file.truncate(written.rfind(b"\n") + 1)


def redact(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of ``config`` without secrets.

    Replaced are: strings under keys that end like the name of a secret, user:password@ in addresses, and the values of
    environment variables with such names, wherever they occur.
    """
    return {key: "***" if is_secret(key) and isinstance(value, str) else _redact_value(value) for key, value in config.items()}


def write_config(run_dir: Path, config: Mapping[str, Any], name: str = CONFIG) -> dict[str, Any]:
    """Write ``config`` without secrets to a file of the run directory, which must exist. Returns what was written."""
    plain = redact(config)
    write_atomic(run_dir / name, yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))
    return plain


def read_config(run_dir: Path) -> dict[str, Any]:
    """The configuration that a run has written. Raises ValueError, with the file, if there is none in it."""
    path = run_dir / CONFIG
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path}: there is no configuration in it; was it copied in part?")
    return config


def leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten ``tree``: dotted key to value. An empty mapping contributes no key."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= leaves(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def leaves_of(tree: Mapping[str, Any]) -> dict[str, str]:
    """Like ``leaves``, with values as JSON."""
    return {key: json.dumps(value) for key, value in leaves(tree).items()}


def start_run(
    run_dir: Path, resume_step: int | None, rollout_dir: Path | None, *, restarted: bool = False, own: bool = True
) -> None:
    """Bring ``run_dir`` to the state of this run after ``resume_step`` (None: a new run), without anything else in it.

    own: whether the run resumes from the checkpoint of that step in ``run_dir``. Otherwise from one of another run, and this
    directory starts empty, also if it has a checkpoint of that step.
    rollout_dir: dumps after resume_step are removed there too, also if it is outside ``run_dir``; a new run replaces its files
    one by one. restarted: the program restarted the run after a failure; the events, which record that, stay in place.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    # Without this file a run counts as running or killed (run_status.read_outcome), which is true from here on.
    (run_dir / OUTCOME).unlink(missing_ok=True)
    if resume_step is None or not own or not checkpoint_dir(run_dir, resume_step).exists():
        written = (
            METRICS, SAMPLES, TIMELINE, ANSWERS, EVENTS, REPORT, TENSORBOARD, ROLLOUTS, SKIPPED_BATCHES,
            WANDB_ID, MLFLOW_ID, SWANLAB_ID, LATEST, BEST, REMOTE, EXPORTED,
        )  # fmt: skip
        outputs = [run_dir / name for name in written if not (restarted and name == EVENTS)]
        for path in _rollouts_after(run_dir / ROLLOUTS, math.inf):  # incomplete ones
            path.unlink()
        _set_aside(run_dir, outputs + [checkpoint_dir(run_dir, step) for step in checkpoint_steps(run_dir)])
        return
    # Later checkpoints exist if the user chose an earlier one, if they are damaged, or if a kill came before LATEST was moved.
    later = [step for step in checkpoint_steps(run_dir) if step > resume_step]
    _set_aside(run_dir, [checkpoint_dir(run_dir, step) for step in later])
    write_atomic(run_dir / LATEST, str(resume_step))
    _forget_best_after(run_dir, resume_step)
    for name in (METRICS, SAMPLES, TIMELINE, ANSWERS):
        _cut_lines(run_dir / name, resume_step)
    for directory in {run_dir / ROLLOUTS, rollout_dir or run_dir / ROLLOUTS}:
        for path in _rollouts_after(directory, resume_step):
            path.unlink()


def resume_hint(run_dir: Path) -> str:
    """Sentence that says from where the same command would resume the run."""
    steps = checkpoint_steps(run_dir) if run_dir.is_dir() else []
    where = f"from {checkpoint_dir(run_dir, steps[-1])}" if steps else "from the beginning: there is no checkpoint"
    return f"with trainer.resume_mode=auto it resumes {where}"


def go_back(run_dir: Path, step: int, rollout_dir: Path | None) -> Path:
    """Roll the directory back to ``step``: move everything after it to earlier_<k>/. Returns that directory.

    The run continues with different data, so the steps written under these numbers next are not the same ones. Unlike a resume
    this therefore loses nothing: each line, dump and checkpoint that is removed here is kept there.
    """
    # LATEST is written first: a run that is killed below resumes from ``step``, and not from the abandoned branch.
    write_atomic(run_dir / LATEST, str(step))
    _forget_best_after(run_dir, step)
    aside = _next_aside(run_dir)
    for name in (METRICS, SAMPLES, TIMELINE, ANSWERS):
        if (run_dir / name).exists():
            # Copy, then remove: a kill in between leaves lines in both files, never in none.
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
    """Remove the record of the best checkpoint if it is later than ``step`` or not whole; the next save names the best."""
    if (run_dir / BEST).exists():
        text = (run_dir / BEST).read_text(errors="replace").strip()
        if not text.isdigit() or int(text) > step:
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


def _rollouts_after(directory: Path, step: float) -> list[Path]:
    """Dumps after ``step``, and incomplete ones of any step."""
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
    aside.mkdir()  # not exist_ok: each call gets a directory of its own
    return aside
