"""Concurrent calls on groups that wait for one another: which failure is reported, and when."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from tests.trainer.watchdogs import watchdog
from trainer.cluster import watchdog as module
from trainer.cluster.watchdog import MEASURED, WIDENED, StartedCall
from workers.controller.group import Future, Limit, PhaseTimeout, Replies, WorkerError
from workers.controller.process_inspection import ProcessState, RankState
from workers.controller.rpc import Call, Failure
from workers.rollout.sync.channel import ChannelLost

NEVER = 1e9


class Later(Replies):
    """One rank's result, or failure, after some seconds."""

    def __init__(self, after: float, result: Any) -> None:
        super().__init__([0])
        self.at, self.result = time.monotonic() + after, result

    def receive(self, timeout: float | None) -> tuple[int, Failure] | None:
        if self.wait([self], timeout):
            if isinstance(self.result, tuple):
                return self.result
            self.add(0, self.result, 0.0)
        return None

    @staticmethod
    def wait(several: Sequence[Any], timeout: float | None) -> list[Any]:
        remaining = min(later.at for later in several) - time.monotonic()
        time.sleep(max(remaining if timeout is None else min(remaining, timeout), 0.0))
        return [later for later in several if time.monotonic() >= later.at]

    def examine(self) -> list[RankState]:
        stopped = ProcessState(pid=7, status="stopped", command="x", rss=0, stacks="", waits_in=())
        return [RankState(0, not self.missing, (stopped,), None, ())]


class Group:
    name = "workers"

    def __init__(self, after: float, result: Any = "fine") -> None:
        self.after, self.result = after, result
        self.limits: list[float] = []

    def call(self, call: Call[Any], *, phase: str, limit: Limit) -> Future[Any]:
        self.limits.append(limit.seconds)
        return Future(call.method, Later(self.after, self.result), [0], phase=phase, limit=limit, begun=0.0)


def together(limits: module.Watchdog, *groups: Group) -> Any:
    return limits.together(
        "sync", *((cast(Any, group), f"part {i}", Call(None, "work", (i,), {})) for i, group in enumerate(groups))
    )


def failed(rank: int, message: str) -> tuple[int, Failure]:
    return rank, Failure("work", message, "", None)


def lost() -> tuple[int, Failure]:
    return failed(0, f"{ChannelLost.__name__}: it closed")


def test_death_of_one_replica_leaves_the_results_of_others(tmp_path: Path) -> None:
    """Any other error is raised."""
    limits = watchdog(tmp_path)
    replies = ["fine", (0, Failure("work", "process 7 died", "", None, process_died=True)), "fine too"]

    def started() -> list[StartedCall[str]]:
        futures = [Future[str]("work", Later(0.0, reply), [0], begun=0.0) for reply in replies]
        return [StartedCall(future, "workers", "generate", "generation", list, 0, 0.0) for future in futures]

    calls = started()
    found = limits.results(calls, every=True)
    death = found.pop(calls[1])
    assert found == {calls[0]: "fine", calls[2]: "fine too"} and isinstance(death, WorkerError) and death.process_died
    replies[1] = failed(0, "RuntimeError: no")
    with pytest.raises(WorkerError, match="RuntimeError: no"):
        limits.results(started(), every=True)


def test_results_are_in_the_order_of_the_calls_and_the_time_is_measured(tmp_path: Path) -> None:
    limits = watchdog(tmp_path, sync=1.0)
    for _ in range(MEASURED):
        assert together(limits, Group(0.2, "slow"), Group(0.0, "quick")) == [["slow"], ["quick"]]
    assert limits.limit("sync").seconds >= WIDENED * 0.2
    group = Group(0.0)
    together(limits, group, group)
    assert group.limits == [limits.limit("sync").seconds] * 2


@pytest.mark.parametrize("first", [True, False])
def test_failure_of_one_group_is_reported_at_once(first: bool, tmp_path: Path) -> None:
    groups = [Group(0.1, failed(3, "OSError: no room")), Group(NEVER)]
    begun = time.monotonic()
    with pytest.raises(WorkerError, match=rf"^rank 3 failed in part {int(not first)}: OSError: no room"):
        together(watchdog(tmp_path), *(groups if first else groups[::-1]))
    assert time.monotonic() - begun < 2.0


@pytest.mark.parametrize("first", [True, False])
def test_lost_connection_waits_for_the_failure_of_the_other_side(first: bool, tmp_path: Path) -> None:
    groups = [Group(0.0, lost()), Group(0.3, failed(0, "process 7 died"))]
    with pytest.raises(WorkerError, match=rf"^rank 0 failed in part {int(first)}: process 7 died"):
        together(watchdog(tmp_path), *(groups if first else groups[::-1]))


@pytest.mark.parametrize("other", [NEVER, 0.0])
def test_lost_connection_is_reported_without_another_failure(
    other: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CAUSE_SECONDS", 0.2)
    with pytest.raises(WorkerError, match="rank 0 failed in part 0: ChannelLost: it closed"):
        together(watchdog(tmp_path), Group(0.05, lost()), Group(other))


@pytest.mark.parametrize("collective", [False, True])
def test_timeout_names_every_call_without_a_result(collective: bool, tmp_path: Path) -> None:
    late = Group(0.0, failed(0, "ChannelLost: Timed out waiting 4000ms for recv operation")) if collective else Group(NEVER)
    begun = time.monotonic()
    with pytest.raises(PhaseTimeout) as raised:
        together(watchdog(tmp_path, sync=0.3), late, Group(NEVER))
    assert time.monotonic() - begun < 2.0
    message = str(raised.value)
    assert message.startswith(
        "a collective in part 0, " if collective else "part 0, limited by timeouts.sync=0.3, took more than 0.3 s"
    )
    assert "\npart 1: step 0, phase sync\nheld up by rank 0: a process of it is stopped" in message


def test_timeout_does_not_name_finished_calls(tmp_path: Path) -> None:
    with pytest.raises(PhaseTimeout) as raised:
        together(watchdog(tmp_path, sync=0.3), Group(0.0), Group(NEVER))
    assert "part 0" not in str(raised.value) and str(raised.value).startswith("part 1, limited by timeouts.sync=0.3")
