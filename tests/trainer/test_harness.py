from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from tests.trainer.checkpoints import content, equal, models, names, responses, saver
from trainer.checkpoint.manifest import read_checkpoint
from trainer.harness import HasArrays, Trainer
from trainer.run.timing import Phases


class Constant:
    """A component whose state is a number."""

    def __init__(self) -> None:
        self.number = 0

    def state(self) -> dict[str, Any]:
        return {"number": self.number}

    def load(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


class InFlight:
    """A component whose state is arrays."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def arrays(self) -> dict[str, Tensor]:
        return self.tensors

    def load_arrays(self, arrays: Mapping[str, Tensor]) -> None:
        self.tensors = dict(arrays)


class Reads:
    """A model that is only loaded."""

    budget = Constant()

    def __init__(self) -> None:
        self.text = ""

    def load(self, path: str) -> None:
        self.text = Path(path, "shard-0.safetensors").read_text()


def trainer_in(run_dir: Path, **arrays: HasArrays) -> Trainer:
    """A Trainer that has completed step 2 and saves the model "actor"."""
    written = models(2, ["actor"])
    cast(Any, written["actor"]).budget = Constant()
    return Trainer(
        lifecycle=cast(Any, None),
        total_steps=4,
        save_every=1,
        resume=None,
        phases=Phases(),
        tracker=cast(Any, None),
        saver=saver(run_dir),
        watchdog=cast(Any, SimpleNamespace(step=0)),
        health=cast(Any, SimpleNamespace(alarms=Constant(), skipped_updates=Constant())),
        models=written,
        stateful={},
        extra_files=lambda step: {},
        arrays=arrays,
        step=2,
    )


def resumed(run_dir: Path, **arrays: HasArrays) -> Reads:
    """Load the checkpoint of step 2 into another Trainer."""
    other, model = trainer_in(run_dir, **arrays), Reads()
    other.models = {"actor": cast(Any, model)}
    other.step = 0
    other.load(read_checkpoint(run_dir / "global_step_2"))
    assert other.step == other.watchdog.step == 2
    return model


def test_arrays_of_components_are_restored_from_a_checkpoint(tmp_path: Path) -> None:
    trainer_in(tmp_path, groups=InFlight(responses(2)["groups"]), other=InFlight({})).save()
    groups, other = InFlight({"left": torch.ones(1)}), InFlight({"left": torch.ones(1)})
    assert resumed(tmp_path, groups=groups, other=other).text == content("actor", 0, 2)
    assert equal(groups.tensors, responses(2)["groups"]) and other.tensors == {}


def test_component_with_arrays_is_emptied_by_a_checkpoint_without_them(tmp_path: Path) -> None:
    """A checkpoint of an earlier version, or of a run without that component."""
    trainer_in(tmp_path).save()
    assert names(tmp_path / "global_step_2") == {"actor", "manifest.json"}
    groups = InFlight({"left": torch.ones(1)})
    resumed(tmp_path, groups=groups)
    assert groups.tensors == {}


class StoppedAt:
    """What Trainer.steps uses of a trainer that has to stop from the end of ``due`` on."""

    def __init__(self, due: int) -> None:
        self.step, self.total_steps, self.saved, self.metrics = 0, 20, list[int](), dict[str, float]()
        self.lifecycle = SimpleNamespace(stopping=SimpleNamespace(is_due=lambda step, *_: step >= due))
        self.phases = SimpleNamespace(seconds={}, clear=lambda: None)
        self.saver = SimpleNamespace(seconds=lambda: 0.0, has=lambda step: step == 6)
        self.watchdog, self.events = SimpleNamespace(step=0), SimpleNamespace(add=lambda *_: None)

    def save(self) -> None:
        self.saved.append(self.step)


@pytest.mark.parametrize(("due", "abandoned", "saved", "last"), [(7, 0, [8], 8), (8, 0, [8], 8), (5, 0, [], 6), (5, 6, [5], 5)])
def test_a_run_stops_where_a_checkpoint_can_be_written(due: int, abandoned: int, saved: list[int], last: int) -> None:
    """After steps that 4 divides; step 6 has a checkpoint. abandoned: a step that cannot be completed any more; then
    the one before it is saved."""
    trainer = StoppedAt(due)
    for step in Trainer.steps(cast(Any, trainer), lambda step, last: last or step % 4 == 0, 4):
        if step != abandoned:
            trainer.step = step
    assert (trainer.saved, trainer.step) == (saved, last)
