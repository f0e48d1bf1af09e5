"""Specifications that are built from a role's configuration."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.algorithms.plain import defaults
from trainer.checkpoint.manifest import Checkpoint, Manifest
from trainer.checkpoint.resume import rate_changes

OPTIM = replace(defaults().actor_rollout_ref.actor.optim, lr=1e-6)


def changes(step: int, trainer: dict[str, Any], steps: int, **optim: Any) -> list[str]:
    """Reported changes for a checkpoint of ``step``, saved with these keys of trainer, in a run of ``steps``, 10 per epoch."""
    config = {"trainer": {"total_training_steps": None} | trainer, "actor": {"optim": {"total_training_steps": -1}}}
    manifest = Manifest(step=step, config=config, **CONTENTS)
    return list(rate_changes(Checkpoint(Path("there"), manifest), {"actor.optim": (replace(OPTIM, **optim), 3)}, steps, 10))


CONTENTS: dict[str, Any] = {name: None for name in Manifest.__dataclass_fields__ if name not in ("step", "config")}


def test_extended_cosine_reports_a_jump_of_the_rate() -> None:
    (line,) = changes(100, {"total_training_steps": 100}, 200, lr_scheduler_type="cosine")
    assert line == (
        "actor.optim: the schedule had 100 training steps and has 200: the learning rate of step 101 goes from 2.22e-09 to "
        "5.24e-07; actor.optim.total_training_steps=100 keeps the old schedule"
    ), "the actor waited for 3 of them"
    assert changes(100, {"total_epochs": 10}, 200, lr_scheduler_type="cosine") == [line]


@pytest.mark.parametrize(
    ("steps", "optim"),
    [
        (200, {"lr_scheduler_type": "constant"}),
        (100, {"lr_scheduler_type": "cosine"}),
        (200, {"lr_scheduler_type": "cosine", "total_training_steps": 100}),
        (200, {"lr_scheduler_type": "linear", "total_training_steps": 100, "lr_warmup_steps_ratio": 0.1}),
    ],
)
def test_change_without_effect_on_the_rate_is_not_reported(steps: int, optim: dict[str, Any]) -> None:
    assert changes(100, {"total_training_steps": 100}, steps, **optim) == []


def test_warm_up_ratio_of_an_extended_run_reports_a_jump() -> None:
    (line,) = changes(8, {"total_training_steps": 100}, 1000, lr_scheduler_type="constant", lr_warmup_steps_ratio=0.1)
    assert "of step 9 goes from 6e-07 to 6e-08" in line
