"""Tracker: writes a run's metrics to metrics.jsonl and forwards them to the loggers that ``trainer.logger`` names."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from configs.base.keys import did_you_mean
from trainer.cluster.watchdog import CallSpan
from trainer.run.logger import Logger, Sample
from trainer.run.provenance import code_version, command_line
from trainer.run.run_dir import (
    ENVIRONMENT,
    GLOBAL_STEP,
    METRICS,
    SAMPLES,
    TIMELINE,
    LineWriter,
    batch_file,
    go_back,
    json_line,
    start_run,
    write_atomic,
    write_config,
)
from trainer.run.timing import Phases, Span
from trainer.tracking.batch_file import save_batch
from trainer.tracking.loggers import LOGGERS, LoggerUnavailable, Run
from trainer.tracking.metrics import gpu_names
from trainer.tracking.sample_dump import write_dump
from workers.batch import Batch
from workers.controller.logs import tell

KEPT_SAMPLES = 32
"""Maximum number of validation responses per step in samples.jsonl, for the report."""
PACKAGES = ("tandem", "torch", "transformers", "ray", "vllm", "sglang", "megatron-core", "numpy", "pyarrow", "hydra-core")


class Tracker:
    """Writes metrics, samples, timeline and rollouts of a run, and forwards them to its loggers.

    The constructor first restores ``run_dir`` to ``resume_step`` (see run_dir.start_run), so it must precede the first save. It
    writes config.yaml and environment.json. A logger that cannot start is reported in one line and left out.

    resume_step: step of the checkpoint, None for a new run. shown_samples: number of validation responses that loggers receive.
    rollout_dir: destination of log_rollouts; None: nothing is written. restarted: see start_run. more: loggers in addition to the
    named ones. own: see start_run. phases: timer of the loop, for the display.
    Raises ValueError for an unknown logger.
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
        own: bool = True,
        more: Sequence[Logger] = (),
        phases: Phases | None = None,
    ) -> None:
        check_loggers(loggers)  # before anything in the run directory is touched
        start_run(run_dir, resume_step, rollout_dir, restarted=restarted, own=own)
        plain = write_config(run_dir, config)
        write_atomic(run_dir / ENVIRONMENT, json.dumps(environment(), indent=1))
        self._config = plain
        self.shown_samples = shown_samples
        self.rollout_dir = rollout_dir
        self.run_dir = run_dir
        # After start_run, which may move or shorten these files.
        self._open()
        self._loggers: list[Logger] = []
        run = Run(run_dir, project, experiment, plain, resume_step or 0, total_steps, phases or Phases())
        # A logger that lacks its package, key or network must not end the run. A name given twice counts once.
        for name in dict.fromkeys(loggers):
            try:
                self._loggers.append(LOGGERS[name](run))
            except LoggerUnavailable as reason:
                tell(f"logger {name} left out: {reason}")
        self._loggers += more

    def _open(self) -> None:
        self._metrics = LineWriter(self.run_dir / METRICS)
        self._samples = LineWriter(self.run_dir / SAMPLES)
        self._timeline = LineWriter(self.run_dir / TIMELINE)

    def go_back(self, step: int) -> Path:
        """Roll back to ``step``: what was written after it is moved to the directory that is returned. See run_dir.go_back."""
        # The files are replaced by shorter ones: the open ones would still write to the old ones.
        self._metrics.close()
        self._samples.close()
        self._timeline.close()
        aside = go_back(self.run_dir, step, self.rollout_dir)
        self._open()
        for logger in self._loggers:
            logger.go_back(step)
        return aside

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write one line of metrics.jsonl, passed to the kernel on return, and forward to the loggers. Called once per step."""
        numbers = {name: float(value) for name, value in metrics.items()}
        # The step is the first key of the line, and its value wins if ``metrics`` has the same key.
        self._metrics.write(json_line({GLOBAL_STEP: step} | numbers | {GLOBAL_STEP: step}))
        for logger in self._loggers:
            logger.log(numbers, step)

    def log_spans(self, spans: Sequence[Span], calls: Sequence[CallSpan], step: int) -> None:
        """Write one line of timeline.jsonl, rounded to milliseconds.

        spans: start, end and pools of the step's phases. calls: calls of workers, with the seconds that each rank took. Calls
        that started before the first span belong to an earlier step and are left out.
        """
        span_rows = [[span.phase, list(span.pools), round(span.start, 3), round(span.end, 3)] for span in spans]
        begun = min((span.start for span in spans), default=0.0)
        work = [
            [call.what, call.pool, round(call.start, 3), [round(end - call.start, 3) for end in call.ends]]
            for call in calls
            if call.start >= begun
        ]
        self._timeline.write(json_line({GLOBAL_STEP: step, "spans": span_rows, "calls": work}))

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Write the first KEPT_SAMPLES validation responses to samples.jsonl; the loggers get the first ``shown_samples``."""
        for sample in samples[:KEPT_SAMPLES]:
            self._samples.write(json_line({GLOBAL_STEP: step, **sample}))
        if shown := samples[: self.shown_samples]:
            for logger in self._loggers:
                logger.log_samples(shown, step)

    def log_rollouts(
        self,
        batch: Batch,
        step: int,
        begun_with: str,
        state: Mapping[str, Any],
        left_out: Sequence[Batch] = (),
        sessions: Batch | None = None,
    ) -> None:
        """Dump the step to ``rollout_dir``, if set: as parquet for people, and the batch bitwise identical for a replay.

        begun_with: model or checkpoint from which this process started. state: of the components, by name, with which the step
        began, where it may differ from that in the checkpoint before it. left_out: responses that did not enter the step; they
        are in the parquet only (sample_dump.write_dump). sessions: record of the step's conversations, for a replay.
        """
        if self.rollout_dir is not None:
            write_dump(self.rollout_dir, step, batch, left_out)
            facts = {"step": step, "weights_of_step": step - 1, "begun_with": begun_with, "config": self._config}
            facts |= {"state": state}
            save_batch(batch_file(self.rollout_dir, step), batch, facts, sessions)

    def close(self) -> None:
        self._metrics.close()
        self._samples.close()
        self._timeline.close()
        for logger in self._loggers:
            logger.close()


def environment() -> dict[str, str]:
    """Command, code, machine and versions, for the report. Imports no package and touches no device."""
    facts = {"command": command_line(), "commit": code_version()["commit"] or "unknown", "python": platform.python_version()}
    facts |= {"platform": platform.platform(), "cpu cores": str(os.cpu_count())}
    if gpus := gpu_names():
        facts["gpus"] = f"{len(gpus)} x {gpus[0]}"
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            facts[package] = metadata.version(package)
    return facts


def check_loggers(names: Sequence[str]) -> None:
    """Raise ValueError if a logger does not exist."""
    unknown = [name for name in names if name not in LOGGERS]
    if unknown:
        near = did_you_mean(unknown[0], LOGGERS)
        raise ValueError(
            f"trainer.logger={','.join(names)}: no logger {', '.join(unknown)}; there are {', '.join(LOGGERS)}{near}"
        )
