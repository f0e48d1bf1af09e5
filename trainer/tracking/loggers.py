"""Loggers that ``trainer.logger`` may name: destinations of a run's metrics in addition to metrics.jsonl.

Each is a class with the interface of trainer/run/logger.py and imports its package only when it is used. One that lacks its
package, key or network raises LoggerUnavailable: the tracker leaves it out, and the run is not affected.
"""

from __future__ import annotations

import netrc
import os
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import yaml
from rich.console import Console

from trainer.run.logger import Logger, Sample
from trainer.run.run_dir import CONFIG, MLFLOW_ID, SWANLAB_ID, TENSORBOARD, WANDB_ID
from trainer.run.timing import Phases
from trainer.tracking.console import ConsoleLogger
from trainer.tracking.display import Display

WANDB_INIT_SECONDS = 30


class LoggerUnavailable(Exception):
    """The logger's package, key or network is missing; the message says which, and what to do."""


@dataclass(frozen=True, slots=True)
class Run:
    """The run, as described to loggers.

    config: without secrets. first_step: steps completed before this process, 0 for a new run. total_steps: None if unknown.
    phases: timer of the loop, for the display.
    """

    run_dir: Path
    project: str
    experiment: str
    config: dict[str, Any]
    first_step: int
    total_steps: int | None
    phases: Phases


class TensorBoardLogger:
    """TensorBoard event files in the run directory."""

    def __init__(self, run: Run) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import Summary
            from torch.utils.tensorboard import FileWriter
            from torch.utils.tensorboard.summary import text
        except ImportError as error:
            raise LoggerUnavailable(f"{error}; pip install tensorboard") from error
        self.summary, self.text = Summary, text
        self.writer = FileWriter(str(run.run_dir / TENSORBOARD))
        self.start = lambda: Event(session_log=SessionLog(status=SessionLog.START))
        if run.first_step:
            self.go_back(run.first_step)
        else:
            self.writer.add_summary(text("config", f"```yaml\n{yaml.safe_dump(run.config, sort_keys=False)}```"), 0)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        values = [self.summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        # One event for all metrics takes a tenth of the time of SummaryWriter, which writes one event per metric.
        self.writer.add_summary(self.summary(value=values), step)
        self.writer.flush()

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        for i, sample in enumerate(samples):
            truth, score = f"ground truth: {sample['ground_truth']}", f"score: {sample['score']:g}"
            lines = "\n---\n".join((sample["prompt"], sample["response"], truth, score)).splitlines()
            self.writer.add_summary(self.text(f"validation/{i}", "\n".join("    " + line for line in lines)), step)

    def go_back(self, step: int) -> None:
        """Hide what was written after ``step`` by an interrupted run or on an abandoned branch.

        TensorBoard discards events from the step of a SessionLog.START event on; the files themselves stay unchanged.
        """
        self.writer.add_event(self.start(), step=step + 1)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WandbLogger:
    """Weights & Biases. A resumed run keeps its id. W&B ignores steps that it has already, also after a rollback."""

    def __init__(self, run: Run) -> None:
        try:
            import wandb
        except ImportError as error:
            raise LoggerUnavailable("package wandb is not installed; pip install wandb") from error
        # Checked first: without a key wandb.init would ask for one on the terminal.
        if not wandb_can_start(os.environ):
            raise LoggerUnavailable("no key: set WANDB_API_KEY, run `wandb login`, or set WANDB_MODE=offline")
        id_file = run.run_dir / WANDB_ID
        try:
            self.run = wandb.init(
                project=run.project,
                name=run.experiment,
                dir=str(run.run_dir),
                config=run.config,
                id=id_file.read_text() if id_file.exists() else None,
                resume="allow",
                settings=wandb.Settings(init_timeout=WANDB_INIT_SECONDS, silent=True),
            )
        except wandb.Error as error:
            raise LoggerUnavailable(" ".join(str(error).split())) from error
        # A resumed run finds the id here and continues the same W&B run.
        id_file.write_text(self.run.id)
        self.table = wandb.Table

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.run.log(dict(metrics), step=step)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        columns = [name for name in samples[0] if name != "conversation"]  # which is in ``response`` as text
        rows = [[dict(sample)[name] for name in columns] for sample in samples]
        self.run.log({"val/generations": self.table(columns=columns, data=rows)}, step=step)

    def go_back(self, step: int) -> None:
        pass

    def close(self) -> None:
        self.run.finish()


class MlflowLogger:
    """MLflow, at MLFLOW_TRACKING_URI. A resumed run keeps its id. A thread of MLflow sends the metrics."""

    def __init__(self, run: Run) -> None:
        try:
            import mlflow
        except ImportError as error:
            raise LoggerUnavailable("package mlflow is not installed; pip install mlflow-skinny") from error
        id_file = run.run_dir / MLFLOW_ID
        try:
            mlflow.set_experiment(run.project)
            if id_file.exists():
                mlflow.start_run(run_id=id_file.read_text())
            else:
                id_file.write_text(mlflow.start_run(run_name=run.experiment).info.run_id)
                mlflow.log_dict(run.config, CONFIG)
        except mlflow.exceptions.MlflowException as error:
            raise LoggerUnavailable(" ".join(str(error).split())) from error
        self.mlflow = mlflow

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        # MLflow rejects @ and brackets in metric names: mean@4 becomes mean_at_4.
        named = {re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_")): value for name, value in metrics.items()}
        self.mlflow.log_metrics(named, step=step, synchronous=False)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        self.mlflow.log_dict([dict(sample) for sample in samples], f"validation/step_{step}.json")

    def go_back(self, step: int) -> None:
        """Do nothing: MLflow keeps all values of a step, so those of the abandoned branch stay in addition to the new ones."""

    def close(self) -> None:
        # log() only queues metrics for MLflow's thread: send the last ones before the run is marked as ended.
        self.mlflow.flush_async_logging()
        self.mlflow.end_run()


class SwanlabLogger:
    """SwanLab: its cloud, or as SWANLAB_MODE says. In the cloud a resumed run keeps its id."""

    def __init__(self, run: Run) -> None:
        try:
            import swanlab
        except ImportError as error:
            raise LoggerUnavailable("package swanlab is not installed; pip install swanlab") from error
        if not swanlab_can_start(os.environ):
            raise LoggerUnavailable("no key: set SWANLAB_API_KEY, run `swanlab login`, or set SWANLAB_MODE=local")
        id_file = run.run_dir / SWANLAB_ID
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:21])  # the length of an id of SwanLab
        resume = {} if in_no_cloud(os.environ) else {"id": id_file.read_text(), "resume": "allow"}
        try:
            swanlab.init(
                project=run.project,
                experiment_name=run.experiment,
                config=run.config,
                logdir=str(run.run_dir / "swanlab"),
                **resume,
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise LoggerUnavailable(" ".join(str(error).split())) from error
        self.swanlab = swanlab

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.swanlab.log(dict(metrics), step=step)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        texts = [self.swanlab.Text(sample["response"], caption=f"{sample['prompt']} ({sample['score']:g})") for sample in samples]
        self.swanlab.log({"val/generations": texts}, step=step)

    def go_back(self, step: int) -> None:
        """Do nothing: like W&B, SwanLab keeps the first values of a step."""

    def close(self) -> None:
        self.swanlab.finish()


def in_no_cloud(env: Mapping[str, str]) -> bool:
    """Whether SWANLAB_MODE keeps SwanLab on this machine."""
    return env.get("SWANLAB_MODE") in ("local", "offline", "disabled")


def swanlab_can_start(env: Mapping[str, str]) -> bool:
    """Whether ``swanlab.init`` would start without asking for a key."""
    home = Path(env.get("SWANLAB_SAVE_DIR", "~/.swanlab")).expanduser()
    return in_no_cloud(env) or bool(env.get("SWANLAB_API_KEY")) or (home / ".netrc").exists()


def wandb_can_start(env: Mapping[str, str]) -> bool:
    """Whether ``wandb.init`` would start without asking for a key: from the environment, or from a netrc file."""
    if env.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
        return True
    if env.get("WANDB_API_KEY") or env.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlparse(env.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    for path in (Path(env["NETRC"]),) if "NETRC" in env else (Path("~/.netrc").expanduser(), Path("~/_netrc").expanduser()):
        # An unreadable file has no key.
        with suppress(netrc.NetrcParseError, OSError, UnicodeDecodeError):
            if host is not None and host in netrc.netrc(str(path)).hosts:
                return True
    return False


def _console(run: Run) -> Logger:
    console = Console()
    display: Display | None = None
    if console.is_terminal and run.total_steps is not None:
        title = f"{run.project} · {run.experiment}"
        display = Display(console, run.run_dir, title, run.phases, run.first_step, run.total_steps)
    return ConsoleLogger(console, run.total_steps, display)


LOGGERS: dict[str, Callable[[Run], Logger]] = {
    "console": _console,
    "tensorboard": TensorBoardLogger,
    "wandb": WandbLogger,
    "mlflow": MlflowLogger,
    "swanlab": SwanlabLogger,
}
