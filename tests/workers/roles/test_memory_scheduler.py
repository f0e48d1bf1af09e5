"""Who is where in each phase, seen by engines that only remember what they were told."""

import gc
from typing import Any, Literal, cast

import pytest
import torch

from workers.roles.memory_scheduler import GCTime, Residency, Tenant


class Told:
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
) -> tuple[Residency, dict[str, Told], list[tuple[str, str]]]:
    book: list[tuple[str, str]] = []
    residency, told = Residency(device), {name: Told(name, book) for name in ("actor", "critic", "rollout")}
    for role in ("actor", "critic"):
        residency.add_model(role, Tenant(cast(Any, told[role]), param_offload=offload, optimizer_offload=offload))
    residency.add_rollout(cast(Any, told["rollout"]), free_cache_engine=free_cache_engine)
    return residency, told, book


def one_step(residency: Residency) -> None:
    residency.enter("sync", "actor")
    residency.enter("generate")
    residency.enter("forward", "actor")
    residency.enter("train", "critic")
    residency.enter("train", "actor")


def test_offloaded_roles_are_on_the_device_only_while_they_work() -> None:
    residency, told, _ = household()
    one_step(residency)
    assert told["actor"].places["params"] == told["actor"].places["optimizer"] == "device"
    assert told["critic"].places["params"] == told["critic"].places["optimizer"] == "cpu"
    residency.enter("forward", "critic")
    assert told["critic"].places["params"] == "device" and told["critic"].places["optimizer"] == "cpu"
    assert told["actor"].places == {"params": "cpu", "grads": "cpu", "optimizer": "cpu"}
    residency.enter("sync", "actor")
    residency.enter("generate")
    assert all(told[role].places == {"params": "cpu", "grads": "cpu", "optimizer": "cpu"} for role in ("actor", "critic"))


def test_the_rollout_engine_sleeps_until_its_first_weights_come() -> None:
    _, _, book = household()
    assert book[-1] == ("rollout", "sleep")
    _, _, book = household(free_cache_engine=False)
    assert ("rollout", "sleep") not in book


def test_memory_is_given_back_before_any_is_taken() -> None:
    """Sync: optimizer leaves, weights wake; generate: the actor's parameters leave, then the cache wakes; train: sleep first."""
    residency, _, book = household()
    one_step(residency)
    book.clear()
    residency.enter("sync", "actor")
    assert book == [("actor", "grads cpu"), ("actor", "optimizer cpu"), ("rollout", "wake weights")]
    book.clear()
    residency.enter("generate")
    assert book == [("actor", "params cpu"), ("rollout", "wake kv_cache")]
    book.clear()
    residency.enter("train", "critic")
    assert book == [("rollout", "sleep"), *(("critic", f"{part} device") for part in ("params", "grads", "optimizer"))]


def test_shared_weights_stay_while_the_engine_generates() -> None:
    residency, told, _ = household()
    residency.enter("sync", "actor")
    residency.share_weights_of("actor")
    residency.enter("generate")
    assert told["actor"].places["params"] == "device" and told["actor"].places["optimizer"] == "cpu"


def test_a_visit_leaves_everyone_where_they_were() -> None:
    """A checkpoint is saved while the rollout engine has its weights, and they must stay good."""
    residency, told, book = household()
    residency.enter("sync", "actor")
    residency.share_weights_of("actor")
    residency.enter("generate")
    book.clear()
    for role in ("actor", "critic"):
        with residency.visit(role):
            assert told[role].places["params"] == "device"
    assert book == [("critic", "params device"), ("critic", "params cpu")]
    residency.enter("generate")


def test_roles_that_are_not_offloaded_stay() -> None:
    residency, told, _ = household(offload=False)
    one_step(residency)
    residency.enter("sync", "actor")
    residency.enter("generate")
    assert told["critic"].places["params"] == told["critic"].places["optimizer"] == "device"


def test_generating_without_weights_names_the_phase() -> None:
    residency, _, _ = household()
    one_step(residency)
    with pytest.raises(AssertionError, match="phase generate after train: the rollout engine slept"):
        residency.enter("generate")


def test_an_engine_that_never_sleeps_may_generate_at_once() -> None:
    residency, _, book = household(free_cache_engine=False)
    one_step(residency)
    residency.enter("generate")
    assert ("rollout", "sleep") not in book


def test_cached_memory_is_released_before_the_engine_takes_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between an update and the engine's wake torch's allocator holds the activations' memory, which the engine cannot use."""
    residency, _, book = household(device="cuda")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: book.append(("torch", "release")))
    one_step(residency)
    book.clear()
    residency.enter("sync", "actor")
    assert book[-2:] == [("torch", "release"), ("rollout", "wake weights")]
    residency.enter("generate")
    assert book[-2:] == [("torch", "release"), ("rollout", "wake kv_cache")]
    book.clear()
    residency.enter("generate")
    assert book == [], "awake already"
    residency.enter("train", "actor")
    assert ("torch", "release") not in book, "the trainer keeps its cache: to take memory anew costs time"


@pytest.mark.parametrize("case", ["cpu", "embedded", "awake"])
def test_nothing_is_released_where_no_engine_needs_it(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """On CPU; for an engine within torch's allocator; for one that never sleeps."""
    residency, told, book = household(device="cpu" if case == "cpu" else "cuda", free_cache_engine=case != "awake")
    told["rollout"].takes_driver_memory = case != "embedded"
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: book.append(("torch", "release")))
    one_step(residency)
    residency.enter("sync", "actor")
    assert ("torch", "release") not in book


def test_sleep_wake_and_release_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    residency, _, _ = household(device="cuda")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    residency.take_seconds()
    one_step(residency)
    seconds = residency.take_seconds()
    assert seconds.keys() == {"engine_sleep", "engine_wake", "release_memory"} and min(seconds.values()) > 0
    assert residency.take_seconds() == {}


def test_seconds_in_the_garbage_collector() -> None:
    collected = GCTime()
    gc.collect()
    first = collected.seconds
    assert first > 0
    collected.close()
    gc.collect()
    assert collected.seconds == first
