"""Where a run's numbers go: metrics.jsonl always, and the loggers that ``trainer.logger`` names."""

from __future__ import annotations

import json
import netrc
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlparse

import yaml
from rich.console import Console

from configs.keys import did_you_mean
from trainer.batch_file import save_batch
from trainer.console import ConsoleLogger
from trainer.dumps import Sample, write_dump
from trainer.metrics import Span, gpu_names
from trainer.run_dir import (
    ENVIRONMENT,
    GLOBAL_STEP,
    METRICS,
    SAMPLES,
    TENSORBOARD,
    TIMELINE,
    WANDB_ID,
    Lines,
    batch_file,
    go_back,
    json_line,
    start_run,
    write_atomic,
    write_config,
)
from workers.batch import Batch

KEPT_SAMPLES = 32
"""Validation answers a step that samples.jsonl keeps for the report."""
PACKAGES = ("tandem", "torch", "transformers", "ray", "vllm", "sglang", "megatron-core", "numpy", "pyarrow", "hydra-core")
WANDB_INIT_SECONDS = 30


class Logger(Protocol):
    """go_back: what was logged past ``step`` is of a branch that is left; the next step is the one after it."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...
    def log_samples(self, samples: Sequence[Sample], step: int) -> None: ...
    def go_back(self, step: int) -> None: ...
    def close(self) -> None: ...


class LoggerUnavailable(Exception):
    """A logger lacks its package, its key or its network."""


@dataclass(frozen=True, slots=True)
class Run:
    """What a logger may want to know. first_step: steps done before this process; 0 when the run starts anew."""

    run_dir: Path
    project: str
    experiment: str
    config: dict[str, Any]
    first_step: int
    total_steps: int | None


class Tracker:
    """Writes a run's metrics, samples and rollouts, and tells the loggers.

    Brings ``run_dir`` to ``resume_step`` first (see run_dir.start_run), so it comes before the first save. Writes
    config.yaml and environment.json. A logger that cannot start says so in one line and is left out.

    resume_step: the checkpoint's, None for a run that starts. shown_samples: validation answers that loggers get.
    rollout_dir: where log_rollouts writes; None: nowhere. restarted: see start_run. more: loggers beside those that are named.
    Raises ValueError for a logger that does not exist.
    """

    def __init__(
        self,
        loggers: Sequence[str],
        run_dir: Path,
        project: str,
        experiment: str,
        config: Mapping[str, Any],
        *,
        resume_step: int | None = None,
        total_steps: int | None = None,
        shown_samples: int = 0,
        rollout_dir: Path | None = None,
        restarted: bool = False,
        more: Sequence[Logger] = (),
    ) -> None:
        check_loggers(loggers)
        start_run(run_dir, resume_step, rollout_dir, restarted=restarted)
        plain = write_config(run_dir, config)
        write_atomic(run_dir / ENVIRONMENT, json.dumps(environment(), indent=1))
        self._config = plain
        self.shown_samples = shown_samples
        self.rollout_dir = rollout_dir
        self.run_dir = run_dir
        self._open()
        self._loggers: list[Logger] = []
        run = Run(run_dir, project, experiment, plain, resume_step or 0, total_steps)
        for name in dict.fromkeys(loggers):
            try:
                self._loggers.append(LOGGERS[name](run))
            except LoggerUnavailable as reason:
                print(f"logger {name} left out: {reason}", file=sys.stderr)
        self._loggers += more

    def _open(self) -> None:
        self._metrics = Lines(self.run_dir / METRICS)
        self._samples = Lines(self.run_dir / SAMPLES)
        self._timeline = Lines(self.run_dir / TIMELINE)

    def go_back(self, step: int) -> Path:
        """The run goes on after ``step`` with other data. What it wrote past it is moved to the directory that is returned."""
        self._metrics.close()
        self._samples.close()
        self._timeline.close()
        aside = go_back(self.run_dir, step, self.rollout_dir)
        self._open()
        for logger in self._loggers:
            logger.go_back(step)
        return aside

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One line of metrics.jsonl, on disk (in the kernel's hands) on return, and the loggers. Once a step."""
        numbers = {name: float(value) for name, value in metrics.items()}
        self._metrics.write(json_line({GLOBAL_STEP: step} | numbers | {GLOBAL_STEP: step}))
        for logger in self._loggers:
            logger.log(numbers, step)

    def log_spans(self, spans: Sequence[Span], step: int) -> None:
        """One line of timeline.jsonl: when the step's phases were under way, and where; to the millisecond."""
        told = [[span.phase, list(span.pools), round(span.start, 3), round(span.end, 3)] for span in spans]
        self._timeline.write(json_line({GLOBAL_STEP: step, "spans": told}))

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Validation answers: the first KEPT_SAMPLES to samples.jsonl, the first ``shown_samples`` to the loggers."""
        for sample in samples[:KEPT_SAMPLES]:
            self._samples.write(json_line({GLOBAL_STEP: step, **sample}))
        if shown := samples[: self.shown_samples]:
            for logger in self._loggers:
                logger.log_samples(shown, step)

    def log_rollouts(self, batch: Batch, step: int, begun_with: str) -> None:
        """Where a rollout_dir is set: the step's answers as parquet for people (dumps.write_dump), and the batch to the bit for
        a replay. begun_with: the model or the checkpoint that this process started from.
        """
        if self.rollout_dir is not None:
            write_dump(self.rollout_dir, step, batch)
            facts = {"step": step, "weights_of_step": step - 1, "begun_with": begun_with, "config": self._config}
            save_batch(batch_file(self.rollout_dir, step), batch, facts)

    def close(self) -> None:
        self._metrics.close()
        self._samples.close()
        self._timeline.close()
        for logger in self._loggers:
            logger.close()


class TensorBoardLogger:
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
        self.writer.add_summary(self.summary(value=values), step)  # one event: a tenth of SummaryWriter's time
        self.writer.flush()

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        for i, sample in enumerate(samples):
            truth, score = f"ground truth: {sample['ground_truth']}", f"score: {sample['score']:g}"
            lines = "\n---\n".join((sample["prompt"], sample["response"], truth, score)).splitlines()
            self.writer.add_summary(self.text(f"validation/{i}", "\n".join("    " + line for line in lines)), step)

    def go_back(self, step: int) -> None:
        """Hides what was written past ``step`` by an interrupted run, or on a branch that is left."""
        self.writer.add_event(self.start(), step=step + 1)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WandbLogger:
    """Weights & Biases. A resumed run goes on under its id; W&B ignores steps that it has already, also after a rollback."""

    def __init__(self, run: Run) -> None:
        try:
            import wandb
        except ImportError as error:
            raise LoggerUnavailable("package wandb is not installed; pip install wandb") from error
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
        id_file.write_text(self.run.id)
        self.table = wandb.Table

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.run.log(dict(metrics), step=step)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        rows = [list(sample.values()) for sample in samples]
        self.run.log({"val/generations": self.table(columns=list(samples[0]), data=rows)}, step=step)

    def go_back(self, step: int) -> None:
        pass

    def close(self) -> None:
        self.run.finish()


def wandb_can_start(env: Mapping[str, str]) -> bool:
    """Whether ``wandb.init`` would start without asking for a key."""
    if env.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
        return True
    if env.get("WANDB_API_KEY") or env.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlparse(env.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    for path in (Path(env["NETRC"]),) if "NETRC" in env else (Path("~/.netrc").expanduser(), Path("~/_netrc").expanduser()):
        if path.exists() and host is not None and host in netrc.netrc(str(path)).hosts:
            return True
    return False


def _console(run: Run) -> Logger:
    return ConsoleLogger(Console(), run.first_step, run.total_steps)


LOGGERS: dict[str, Callable[[Run], Logger]] = {"console": _console, "tensorboard": TensorBoardLogger, "wandb": WandbLogger}


def environment() -> dict[str, str]:
    """Versions and machine, for the report. Loads no package and touches no device."""
    facts = {"python": platform.python_version(), "platform": platform.platform(), "cpu cores": str(os.cpu_count())}
    if gpus := gpu_names():
        facts["gpus"] = f"{len(gpus)} x {gpus[0]}"
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            facts[package] = metadata.version(package)
    return facts


def check_loggers(names: Sequence[str]) -> None:
    """Raises ValueError for a logger that does not exist."""
    unknown = [name for name in names if name not in LOGGERS]
    if unknown:
        near = did_you_mean(unknown[0], LOGGERS)
        raise ValueError(
            f"trainer.logger={','.join(names)}: no logger {', '.join(unknown)}; there are {', '.join(LOGGERS)}{near}"
        )
