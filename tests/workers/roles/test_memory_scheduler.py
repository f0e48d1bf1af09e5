"""What is on the device in each phase, with engines that only record their calls."""

import gc
from collections.abc import Iterator
from typing import Any, Literal, cast

import pytest
import torch

from workers.roles.memory_scheduler import GCTime, MemoryScheduler, ResidentModel


class RecordingEngine:
    """Remembers moves, sleeps and wakes in order, in a book that all share."""

    takes_driver_memory = True

    def __init__(self, name: str, book: list[tuple[str, str]]) -> None:
        self.name, self.book = name, book
        self.places = {"params": "device", "grads": "device", "optimizer": "device"}

    def move(self, **places: str | None) -> None:
        for part, place in places.items():
            if place is not None and self.places[part] != place:
                self.places[part] = place
                self.book.append((self.name, f"{part} {place}"))

    def sleep(self) -> None:
        self.book.append((self.name, "sleep"))

    def wake(self, *, weights: bool, kv_cache: bool) -> None:
        self.book.append((self.name, "wake" + " weights" * weights + " kv_cache" * kv_cache))


def household(
    *, free_cache_engine: bool = True, offload: bool = True, device: Literal["cpu", "cuda"] = "cpu"
) -> tuple[MemoryScheduler, dict[str, RecordingEngine], list[tuple[str, str]]]:
    book: list[tuple[str, str]] = []
    memory_scheduler, reported = (
        MemoryScheduler(device),
        {name: RecordingEngine(name, book) for name in ("actor", "critic", "rollout")},
    )
    for role in ("actor", "critic"):
        memory_scheduler.add_model(
            role, ResidentModel(cast(Any, reported[role]), param_offload=offload, optimizer_offload=offload)
        )
    memory_scheduler.add_rollout(cast(Any, reported["rollout"]), free_cache_engine=free_cache_engine)
    return memory_scheduler, reported, book


def one_step(memory_scheduler: MemoryScheduler) -> None:
    memory_scheduler.enter("sync", "actor")
    memory_scheduler.enter("generate")
    memory_scheduler.enter("forward", "actor")
    memory_scheduler.enter("train", "critic")
    memory_scheduler.enter("train", "actor")


def test_offloaded_roles_are_on_the_device_only_while_they_work() -> None:
    memory_scheduler, reported, _ = household()
    one_step(memory_scheduler)
    assert reported["actor"].places["params"] == reported["actor"].places["optimizer"] == "device"
    assert reported["critic"].places["params"] == reported["critic"].places["optimizer"] == "cpu"
    memory_scheduler.enter("forward", "critic")
    assert reported["critic"].places["params"] == "device" and reported["critic"].places["optimizer"] == "cpu"
    assert reported["actor"].places == {"params": "cpu", "grads": "cpu", "optimizer": "cpu"}
    memory_scheduler.enter("sync", "actor")
    memory_scheduler.enter("generate")
    assert all(reported[role].places == {"params": "cpu", "grads": "cpu", "optimizer": "cpu"} for role in ("actor", "critic"))


def test_the_rollout_engine_sleeps_until_its_first_weights_come() -> None:
    _, _, book = household()
    assert book[-1] == ("rollout", "sleep")
    _, _, book = household(free_cache_engine=False)
    assert ("rollout", "sleep") not in book


def test_memory_is_given_back_before_any_is_taken() -> None:
    """Sync: optimizer leaves, weights wake; generate: the actor's parameters leave, then the cache wakes; train: sleep first."""
    memory_scheduler, _, book = household()
    one_step(memory_scheduler)
    book.clear()
    memory_scheduler.enter("sync", "actor")
    assert book == [("actor", "grads cpu"), ("actor", "optimizer cpu"), ("rollout", "wake weights")]
    book.clear()
    memory_scheduler.enter("generate")
    assert book == [("actor", "params cpu"), ("rollout", "wake kv_cache")]
    book.clear()
    memory_scheduler.enter("train", "critic")
    assert book == [("rollout", "sleep"), *(("critic", f"{part} device") for part in ("params", "grads", "optimizer"))]


def test_shared_weights_stay_while_the_engine_generates() -> None:
    memory_scheduler, reported, _ = household()
    memory_scheduler.enter("sync", "actor")
    memory_scheduler.share_weights_of("actor")
    memory_scheduler.enter("generate")
    assert reported["actor"].places["params"] == "device" and reported["actor"].places["optimizer"] == "cpu"


def test_a_visit_leaves_everyone_where_they_were() -> None:
    """A checkpoint is saved while the rollout engine has its weights, and they must stay good."""
    memory_scheduler, reported, book = household()
    memory_scheduler.enter("sync", "actor")
    memory_scheduler.share_weights_of("actor")
    memory_scheduler.enter("generate")
    book.clear()
    for role in ("actor", "critic"):
        with memory_scheduler.parameters_on_device(role):
            assert reported[role].places["params"] == "device"
    assert book == [("critic", "params device"), ("critic", "params cpu")]
    memory_scheduler.enter("generate")


def test_roles_that_are_not_offloaded_stay() -> None:
    memory_scheduler, reported, _ = household(offload=False)
    one_step(memory_scheduler)
    memory_scheduler.enter("sync", "actor")
    memory_scheduler.enter("generate")
    assert reported["critic"].places["params"] == reported["critic"].places["optimizer"] == "device"


def test_generating_without_weights_names_the_phase() -> None:
    memory_scheduler, _, _ = household()
    one_step(memory_scheduler)
    with pytest.raises(AssertionError, match="phase generate after train: the rollout engine slept"):
        memory_scheduler.enter("generate")


def test_an_engine_that_never_sleeps_may_generate_at_once() -> None:
    memory_scheduler, _, book = household(free_cache_engine=False)
    one_step(memory_scheduler)
    memory_scheduler.enter("generate")
    assert ("rollout", "sleep") not in book


def test_cached_memory_is_released_before_the_engine_takes_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between an update and the engine's wake torch's allocator holds the activations' memory, which the engine cannot use."""
    memory_scheduler, _, book = household(device="cuda")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: book.append(("torch", "release")))
    one_step(memory_scheduler)
    book.clear()
    memory_scheduler.enter("sync", "actor")
    assert book[-2:] == [("torch", "release"), ("rollout", "wake weights")]
    memory_scheduler.enter("generate")
    assert book[-2:] == [("torch", "release"), ("rollout", "wake kv_cache")]
    book.clear()
    memory_scheduler.enter("generate")
    assert book == [], "awake already"
    memory_scheduler.enter("train", "actor")
    assert ("torch", "release") not in book, "the trainer keeps its cache: to take memory anew costs time"


@pytest.mark.parametrize("case", ["cpu", "embedded", "awake"])
def test_nothing_is_released_where_no_engine_needs_it(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """On CPU; for an engine within torch's allocator; for one that never sleeps."""
    memory_scheduler, reported, book = household(device="cpu" if case == "cpu" else "cuda", free_cache_engine=case != "awake")
    reported["rollout"].takes_driver_memory = case != "embedded"
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: book.append(("torch", "release")))
    one_step(memory_scheduler)
    memory_scheduler.enter("sync", "actor")
    assert ("torch", "release") not in book


def test_sleep_wake_and_release_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    memory_scheduler, _, _ = household(device="cuda")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    memory_scheduler.take_seconds()
    one_step(memory_scheduler)
    seconds = memory_scheduler.take_seconds()
    assert seconds.keys() == {"engine_sleep", "engine_wake", "release_memory"} and min(seconds.values()) > 0
    assert memory_scheduler.take_seconds() == {}


@pytest.fixture
def unfrozen() -> Iterator[None]:
    """Objects that tests froze are frozen again afterwards; see conftest.py."""
    gc.unfreeze()
    yield
    gc.freeze()


def test_permanent_objects_leave_garbage_collection_after_the_first_update(unfrozen: None) -> None:
    memory_scheduler, _, _ = household()
    one_step(memory_scheduler)
    assert gc.get_freeze_count() == 0
    memory_scheduler.enter("sync", "actor")
    permanent = gc.get_freeze_count()
    assert permanent > 1000 and len(gc.get_objects()) < permanent / 10
    later = [{} for _ in range(100)]  # garbage of later steps is collected
    one_step(memory_scheduler)
    memory_scheduler.enter("sync", "actor")
    assert gc.get_freeze_count() <= permanent and all(map(gc.is_tracked, [later]))


@pytest.mark.parametrize("own", [{"free_cache_engine": False}, {"takes_driver_memory": False}])
def test_nothing_is_exempt_where_no_engine_collects(unfrozen: None, own: dict[str, bool]) -> None:
    memory_scheduler, reported, _ = household(free_cache_engine=own.get("free_cache_engine", True))
    reported["rollout"].takes_driver_memory = own.get("takes_driver_memory", True)
    one_step(memory_scheduler)
    memory_scheduler.enter("sync", "actor")
    assert gc.get_freeze_count() == 0


def test_seconds_in_the_garbage_collector() -> None:
    collected = GCTime()
    gc.collect()
    first = collected.seconds
    assert first > 0
    collected.close()
    gc.collect()
    assert collected.seconds == first
