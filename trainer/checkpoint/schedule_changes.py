"""Learning rates that jump because a run is resumed with another length."""

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
    """A line for each role whose learning rate jumps because a run is resumed with another length.

    optims: by their key, with the number of first steps in which the role waits. steps: of the run, as it is now.
    """
    trainer = resume.manifest.config["trainer"]
    steps_before = trainer["total_training_steps"] or trainer["total_epochs"] * steps_per_epoch
    for key, (now, waits) in optims.items():
        saved = reduce(getitem, key.split("."), resume.manifest.config)
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
    """The learning rate of the next training step after ``done``, in a run of ``steps``."""
    return learning_rate(optimizer_spec(optim, steps), max(0, done))
