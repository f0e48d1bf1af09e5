"""Training from a script: ``from trainer import run_ppo``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from configs.base.keys import ConfigError
from configs.base.locks import check_writable
from configs.compose import compose_with_notes
from configs.schema.ppo import PPOConfig
from trainer.cli.auto_placement import plan_error, planned
from trainer.cli.earlier_runs import in_earlier_directory
from trainer.cli.preflight import check_ppo_config, ppo_inputs
from trainer.run.run_status import last_metrics, objective_of

if TYPE_CHECKING:
    from trainer.run.logger import Sample


@dataclass(frozen=True, slots=True)
class RunResult:
    """Result of a completed run.

    metrics: last value of each metric in metrics.jsonl. objective: value of trainer.objective, larger is better; None: it is
    not set.
    """

    run_dir: Path
    metrics: dict[str, float]
    objective: float | None


class Callback:
    """Hooks of a script into a run; override those that are needed.

    The run waits for each call. An exception ends the run and is raised by run_ppo. step: number of training steps that are
    done. After a restart (trainer.max_restarts) or a rollback (alarms) some steps are reported again.
    """

    def on_train_begin(self, config: PPOConfig) -> None:
        """Called once, before anything is started. config: after all checks."""

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called after each step. metrics: its line of metrics.jsonl, which is on disk; its checkpoint is not yet."""

    def on_validation_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called after a validation, before on_step_end of the same step. metrics: those that begin with val.

        Step 0 is validated with trainer.val_before_train.
        """

    def on_train_end(self, result: RunResult) -> None:
        """Called once, if the run has reached its end."""


class _Calls:
    """Logger that passes metrics on to callbacks."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self.callbacks = callbacks

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        validation = {name: value for name, value in metrics.items() if name.startswith("val")}
        for callback in self.callbacks:
            if validation:
                callback.on_validation_end(step, validation)
            if step:
                callback.on_step_end(step, metrics)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        pass

    def go_back(self, step: int) -> None:
        pass

    def close(self) -> None:
        pass


def run_ppo(config: PPOConfig | Sequence[str], callbacks: Sequence[Callback] = ()) -> RunResult:
    """Train as ``python -m trainer.main_ppo`` does. Call it from the main thread: Ray and signals need it.

    config: from configs.compose.compose, possibly changed by dataclasses.replace; or the words of a command line,
    ["recipe=quickstart", "trainer.total_training_steps=20"].

    Raises ConfigError (a ValueError) for an invalid configuration or missing files, ValueError or FileNotFoundError for other
    errors that the user can fix, trainer.run.errors.Stopped if the run was stopped and can be resumed, CheckFailed if an alarm
    stopped it, WorkerError or PhaseTimeout for failures of workers.
    """
    if isinstance(config, PPOConfig):
        return _run(config, frozenset(), [], callbacks)
    return _run(*compose_with_notes("ppo_trainer", PPOConfig, config), callbacks)


def _run(config: PPOConfig, typed: frozenset[str], notes: list[str], callbacks: Sequence[Callback]) -> RunResult:
    config, earlier_notes = in_earlier_directory(config, "ppo_trainer", typed)
    trainer = config.trainer
    for key, value in (("trainer.dry_run", trainer.dry_run), ("trainer.replay.mode", trainer.replay.mode)):
        if value is not None:
            raise ValueError(f"{key}={value}: not in run_ppo, which trains; python -m trainer.main_ppo does it")
    config, settled = planned(config, typed)
    notes = [*notes, *earlier_notes, *settled, *check_ppo_config(config, typed)]
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    if problems := list(ppo_inputs(config)):
        raise ConfigError("\n".join(problems))
    check_writable(Path(trainer.default_local_dir), "trainer.default_local_dir")
    for callback in callbacks:
        callback.on_train_begin(config)

    # Imported after all checks: it loads torch and Ray.
    from trainer.ppo.ppo_builder import run

    run(config, notes, [_Calls(callbacks)], plan_error(config))
    run_dir = Path(trainer.default_local_dir)
    objective = None if trainer.objective is None else objective_of(run_dir, trainer.objective)
    result = RunResult(run_dir, last_metrics(run_dir), objective)
    for callback in callbacks:
        callback.on_train_end(result)
    return result
