"""The parts of a start sum to its time, whatever the workers did concurrently."""

from collections.abc import Iterator

import pytest

from trainer.run import timing
from trainer.run.timing import Start, program_began


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The simulated time, as the only element."""
    now = [100.0]
    monkeypatch.setattr(timing.time, "time", lambda: now[0])
    monkeypatch.setattr(timing, "_process_began", [])  # by a program of another test that has not begun a run
    yield now


def started(clock: list[float]) -> Start:
    begun = Start()
    for part, end in {"checks": 101.0, "backend": 104.0, "data": 106.0, "models": 120.0, "engine": 140.0, "sync": 141.0}.items():
        clock[0] = end
        begun.ended(part)
    return begun


@pytest.mark.parametrize(("ready", "waited"), [(105.0, 0.0), (109.5, 3.5), (130.0, 14.0)])
def test_parts_of_a_start_sum_to_its_time(clock: list[float], ready: float, waited: float) -> None:
    """The wait for workers that are not ready when the controller is does not count as time of the models."""
    seconds = started(clock).seconds([(ready, {"actor": 2.0, "actor/read": 1.0}), (ready - 1.0, {"actor": 3.0})])
    assert (seconds["workers"], seconds["models"], seconds["total"]) == (waited, 14.0 - waited, 41.0)
    assert sum(spent for name, spent in seconds.items() if "/" not in name) == 2 * seconds["total"]
    assert (seconds["ranks/actor"], seconds["ranks/actor/read"]) == (3.0, 1.0), "of the slowest rank"


def test_only_the_first_run_of_a_process_counts_from_the_process_start(clock: list[float]) -> None:
    clock[0] = 4e9
    program_began()
    assert Start().seconds([])["program"] > 3600.0
    assert Start().seconds([]) == {"total": 0.0, "program": 0.0}
