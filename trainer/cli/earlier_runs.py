"""Run directories of earlier versions, whose default was checkpoints/<project_name>/<experiment_name>."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from configs.schema.common import RunConfig, RunnableConfig
from trainer.run.run_dir import LATEST

Config = TypeVar("Config", bound=RunnableConfig)

PROJECT = "tandem"
NAMES = {
    "ppo_trainer": ("ppo", "verl_examples", "gsm8k"),
    "sft_trainer": ("sft", "gsm8k-sft", "test"),
    "reward_model_trainer": ("reward_model", "reward-model", "test"),
}
"""By root YAML: default experiment, and the default project and experiment of earlier versions that had the program."""


def in_earlier_directory(config: Config, root: str, typed: Collection[str]) -> tuple[Config, list[str]]:
    """The configuration with the default run directory of earlier versions if that has a checkpoint and the present one is new.

    typed: keys on the command line. Also returns the notes for the user.
    """
    trainer = config.trainer
    if (
        root not in NAMES
        or not isinstance(trainer, RunConfig)
        or trainer.resume_mode != "auto"
        or "trainer.default_local_dir" in typed
    ):
        return config, []
    experiment, old_project, old_experiment = NAMES[root]
    now = f"runs/{trainer.experiment_name}"
    # A trial of a sweep has a numbered directory below.
    match = re.fullmatch(rf"{re.escape(now)}((?:/\d+)?)", trainer.default_local_dir)
    project = old_project if trainer.project_name == PROJECT else trainer.project_name
    name = old_experiment if trainer.experiment_name == experiment else trainer.experiment_name
    before = f"checkpoints/{project}/{name}{match[1] if match else ''}"
    if match is None or Path(trainer.default_local_dir).exists() or not Path(before, LATEST).is_file():
        return config, []
    note = (
        f"trainer.default_local_dir={before}: a run of an earlier version is there and is continued; "
        f"trainer.default_local_dir={trainer.default_local_dir} starts in the directory that is the default now"
    )
    return replace(config, trainer=replace(trainer, default_local_dir=before)), [note]  # type: ignore[type-var]
