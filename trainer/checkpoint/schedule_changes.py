"""Detect learning-rate jumps of a run that is resumed with another number of steps.

A schedule that depends on the total number of steps moves when that number changes. The rate of the next step is therefore
computed under the old and under the new number, and the two are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import reduce
from operator import getitem

from configs.schema.common import OptimConfig
from trainer.checkpoint.manifest import Checkpoint
from trainer.cluster.role_builder import optimizer_spec, schedule_length
from workers.engine.lr_schedule import learning_rate


def rate_changes(
    resume: Checkpoint, optims: Mapping[str, tuple[OptimConfig, int]], steps: int, steps_per_epoch: int
) -> Iterator[str]:
    """Yield one line per role whose learning rate changes at the resumed step.

    optims: {configuration key: (optimizer, number of initial steps in which the role is not updated)}. steps: of the run, under
    the current configuration. steps_per_epoch: to derive the old number of steps, if it was given in epochs.
    """
    trainer = resume.manifest.config["trainer"]
    steps_before = trainer["total_training_steps"] or trainer["total_epochs"] * steps_per_epoch
    for key, (now, waits) in optims.items():
        saved = reduce(getitem, key.split("."), resume.manifest.config)
        # All other settings of the optimizer are those of the current run: check_config refuses a change of them.
        before = replace(now, total_training_steps=saved["total_training_steps"])
        old, new = (_rate(optim, run, resume.step - waits) for optim, run in ((before, steps_before), (now, steps)))
        if old != new:
            length = schedule_length(before, steps_before)
            jump = f"the learning rate of step {resume.step + 1} goes from {old:.3g} to {new:.3g}"
            yield (
                f"{key}: the schedule had {length} training steps and has {schedule_length(now, steps)}: {jump}; "
                f"{key}.total_training_steps={length} keeps the old schedule"
            )


def _rate(optim: OptimConfig, steps: int, done: int) -> float:
    """Learning rate of the training step after ``done`` steps, in a run of ``steps``."""
    return learning_rate(optimizer_spec(optim, steps), max(0, done))
