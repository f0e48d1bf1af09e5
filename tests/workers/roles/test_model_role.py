"""How a role's save is started, polled and reported."""

from concurrent.futures import Future
from typing import Any, cast

import pytest

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
