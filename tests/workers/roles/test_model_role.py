"""How a role's save is started, polled and reported."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import pytest

from tests.tiny import save_tiny_model
from tests.workers.engine.toy import one_rank, toy_engine
from workers.engine.base import Saved, SavedFile
from workers.roles.memory_scheduler import MemoryScheduler, ResidentModel
from workers.roles.model_role import ModelRole

SAVED = Saved(files=[SavedFile(name="shard", size=1, sha256="0")], seconds=1.0)


class Engine:
    def __init__(self) -> None:
        self.asked: list[tuple[str, bool]] = []

    def move(self, **places: str | None) -> None:
        pass

    def save(self, path: str, *, background: bool) -> Future[Saved]:
        self.asked.append((path, background))
        self.future: Future[Saved] = Future()
        return self.future


def test_a_pending_save_can_be_polled() -> None:
    engine = Engine()
    memory_scheduler = MemoryScheduler()
    memory_scheduler.add_model("actor", ResidentModel(cast(Any, engine), param_offload=False, optimizer_offload=False))
    role = ModelRole("actor", cast(Any, engine), None, memory_scheduler)
    role.save("somewhere", True)
    assert engine.asked == [("somewhere", True)] and role.saved(False) is None
    with pytest.raises(AssertionError, match="the last save is still under way"):
        role.save("elsewhere", True)
    engine.future.set_result(SAVED)
    assert role.saved(False) == role.saved(True) == SAVED
    role.save("elsewhere", False)
    engine.future.set_exception(OSError(28, "No space left on device"))
    assert role.saved(True) == "[Errno 28] No space left on device"
    role.save("third", False)
    engine.future.set_exception(KeyError("a mistake of the engine"))
    with pytest.raises(KeyError):
        role.saved(True)


def test_offloaded_parameters_are_exported_after_a_save(tmp_path: Path) -> None:
    """The order of a fine-tuning run's end."""
    with one_rank(tmp_path):
        engine = toy_engine(save_tiny_model(tmp_path / "model", "qwen2"), param_offload=True)
        scheduler = MemoryScheduler("cpu")
        scheduler.add_model("model", ResidentModel(engine, param_offload=True, optimizer_offload=False))
        role = ModelRole("model", engine, None, scheduler)
        scheduler.enter("train", "model")
        role.save(str(tmp_path / "checkpoint"), False)
        assert isinstance(role.saved(True), Saved)
        role.export_hf(str(tmp_path / "export"))
    assert (tmp_path / "export" / "config.json").exists()
