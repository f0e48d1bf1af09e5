"""The parts of a start add up, whatever the workers did beside the controller."""

from collections.abc import Iterator

import pytest

from trainer.run import start_times
from trainer.run.start_times import Start, program_began, sentence


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """What the time is, in its one element."""
    now = [100.0]
    monkeypatch.setattr(start_times.time, "time", lambda: now[0])
    yield now


def started(clock: list[float]) -> Start:
    begun = Start()
    for part, end in {"checks": 101.0, "backend": 104.0, "data": 106.0, "models": 120.0, "engine": 140.0, "sync": 141.0}.items():
        clock[0] = end
        begun.ended(part)
    return begun


@pytest.mark.parametrize(("ready", "waited"), [(105.0, 0.0), (109.5, 3.5), (130.0, 14.0)])
def test_the_parts_add_up(clock: list[float], ready: float, waited: float) -> None:
    """Workers that are not ready when the controller is are waited for, and that is no part of the models."""
    seconds = started(clock).seconds([(ready, {"actor": 2.0, "actor/read": 1.0}), (ready - 1.0, {"actor": 3.0})])
    assert (seconds["workers"], seconds["models"], seconds["total"]) == (waited, 14.0 - waited, 41.0)
    assert sum(spent for name, spent in seconds.items() if "/" not in name) == 2 * seconds["total"]
    assert (seconds["ranks/actor"], seconds["ranks/actor/read"]) == (3.0, 1.0), "the slowest rank's"


def test_a_program_counts_from_the_start_of_its_process_and_the_next_run_in_it_does_not(clock: list[float]) -> None:
    clock[0] = 4e9
    program_began()
    assert Start().seconds([])["program"] > 3600.0
    assert Start().seconds([]) == {"total": 0.0, "program": 0.0}


def test_a_sentence(clock: list[float]) -> None:
    message = sentence(started(clock).seconds([(109.5, {"actor": 2.0, "actor/read": 1.0})]))
    assert message == (
        "41.0 s to the first generation: checks 1.0, backend 3.0, data 2.0, workers 3.5, models 10.5, engine 20.0, sync 1.0"
    )
    assert sentence({"total": 0.4, "program": 0.4}) == "0.4 s to the first generation"
