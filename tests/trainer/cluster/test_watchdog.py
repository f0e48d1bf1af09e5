"""Limits of calls, and hangs of the controller itself."""

import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.trainer.rewards.config import reward_config
from tests.trainer.watchdogs import watchdog
from trainer.cluster import watchdog as module
from trainer.cluster.watchdog import MEASURED, MOST_SPANS, WIDENED, CallSpan, CallSpans, Watchdog
from trainer.rewards.pool.runner import RewardRunner
from trainer.rewards.scoring import Response
from workers.controller.group import Limit, PhaseTimeout

ROOT = Path(__file__).parents[3]


class Clocked:
    """A group whose calls take a given time of a simulated clock."""

    name = "workers"

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.limits = 0.0, [0.0]
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)

    def call(self, seconds: float, *, mesh: None, phase: str, limit: Limit) -> Any:
        self.limits.append(limit.seconds)

        def result() -> list[None]:
            self.now += seconds
            if seconds > limit.seconds:
                raise PhaseTimeout(limit.of(phase), [0], limit.seconds)
            return []

        return SimpleNamespace(begun=0.0, replies=SimpleNamespace(ended={0: 0.0}), result=result)


def test_limit_grows_with_measured_times_and_never_shrinks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limits, group = watchdog(tmp_path, update=20.0), Clocked(monkeypatch)

    def took(seconds: float) -> float:
        limits.call(cast(Any, group), "update", "update", cast(Any, seconds))
        return group.limits[-1]

    assert [took(seconds) for seconds in (1.0, 9.0, 5.0)] == [20.0] * MEASURED
    assert took(1.0) == WIDENED * 9.0
    assert limits.limit("forward").seconds == 300.0, "each phase separately"
    with pytest.raises(PhaseTimeout, match=r"timeouts\.update=20, widened by what was measured, took more than 90 s"):
        took(91.0)
    assert took(1.0) == 90.0, "a call that timed out does not count"
    quick = watchdog(tmp_path, update=20.0)
    for _ in range(MEASURED):
        quick.call(cast(Any, group), "update", "update", cast(Any, 0.1))
    assert quick.limit("update").seconds == 20.0


def test_hurry_names_the_calls_that_are_waited_for_and_their_limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limits, group = watchdog(tmp_path, update=20.0), Clocked(monkeypatch)
    assert limits.hurry() == ""
    waits = []
    monkeypatch.setattr(group, "call", lambda *_, **__: future)
    future = SimpleNamespace(begun=0.0, replies=SimpleNamespace(ended={}), result=lambda: waits.append(limits.hurry()) or [])
    limits.call(cast(Any, group), "update", "update of actor", cast(Any, 0.0))
    assert waits == ["update of actor (20 s at most, timeouts.update=20)"] and limits.hurry() == ""
    with limits.own("reward", "scoring", "3 answers"):
        assert limits.hurry() == "scoring, 5 s at most: then the step is dropped"


@pytest.mark.parametrize("count", [3, MOST_SPANS, MOST_SPANS + 1, 5 * MOST_SPANS + 7])
def test_records_of_many_calls_are_merged_in_order_and_cover_the_total_time(count: int) -> None:
    spans = CallSpans()
    for call in range(count):
        spans.add("generation", "workers", float(call), {0: call + 0.5, 1: call + 0.75})
    taken = spans.taken()
    assert len(taken) == count if count <= MOST_SPANS else MOST_SPANS / 2 <= len(taken) <= MOST_SPANS
    assert sum(span.calls for span in taken) == count and taken[0].start == 0.0
    assert taken[-1].ends == (count - 0.5, count - 0.25)
    for first, second in pairwise(taken):
        assert first.start + first.calls == second.start and first.ends == (second.start - 0.5, second.start - 0.25)
        assert first.calls == taken[0].calls


def test_records_of_replicas_and_phases_are_separate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_SPANS", 2)
    spans = CallSpans()
    for call in range(4):
        spans.add("generation", "workers", float(call), {call % 2: call + 0.5})
    spans.add("update", "workers", 4.0, {0: 5.0, 1: 5.0})
    kept = [CallSpan("generation", "workers", call, (call + 0.5,) if call % 2 == 0 else (call, call + 0.5)) for call in range(4)]
    assert spans.taken() == [*kept, CallSpan("update", "workers", 4.0, (5.0, 5.0))]
    spans.add("generation", "workers", 6.0, {1: 6.5})
    assert spans.taken()[1] == CallSpan("generation", "workers", 1.0, (1.0, 3.5), calls=2)


def scorers(tmp_path: Path, body: str, **changes: Any) -> RewardRunner:
    (tmp_path / "reward.py").write_text(
        f"import time\ndef compute_score(data_source, solution_str, ground_truth, extra_info):\n {body}\n"
    )
    custom = {"path": str(tmp_path / "reward.py"), "name": "compute_score", "reward_kwargs": {}}
    return RewardRunner(reward_config(custom_reward_function=custom, **changes))


def scored_late(limits: Watchdog, rewards: RewardRunner) -> PhaseTimeout:
    with rewards:
        rewards.wait_ready()
        begun = time.monotonic()
        with pytest.raises(PhaseTimeout) as raised, limits.own("reward", "scoring", "2 answers"):
            rewards.score([Response("x", "1", "1", {}, finished=True)] * 2)
    assert time.monotonic() - begun < 10
    return raised.value


def test_simultaneous_hangs_of_two_pools_are_reported_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each looks for a free directory and counts the reports before it."""
    at_work, met = [0], [0]

    def record(stall: Any, run_dir: Path) -> Path:
        at_work[0] += 1
        met[0] = max(met[0], at_work[0])
        time.sleep(0.1)
        at_work[0] -= 1
        return run_dir

    monkeypatch.setattr(module, "record", record)
    limits = watchdog(tmp_path)
    threads = [threading.Thread(target=limits._report, args=("update", "update", (), list)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert met == [1]


@pytest.mark.parametrize(("num_workers", "place"), [(0, "reward.py:3 in compute_score"), (1, "in _turn")])
def test_scorer_that_never_returns_ends_at_the_limit_of_the_round(num_workers: int, place: str, tmp_path: Path) -> None:
    """In the controller, where a response has no limit of its own; and in a pool whose limit for a response is longer."""
    limits = watchdog(tmp_path, reward=0.3)
    limits.step = 4
    late = scored_late(limits, scorers(tmp_path, "time.sleep(600)", num_workers=num_workers, timeout=600.0))
    assert str(late).startswith(
        "scoring, limited by timeouts.reward=0.3, took more than 0.3 s\nstep 4, phase reward\ncontroller (process "
    )
    assert place in late.last_words and "worked on 2 answers" in late.last_words
    report = (tmp_path / "logs/stall_4_reward/controller.txt").read_text()
    assert "in scored_late" in report and ("in main" in report) == (num_workers == 1), (
        "the report has the stacks of child processes"
    )
    assert '"kind": "stall"' in (tmp_path / "events.jsonl").read_text()


def test_judge_that_never_answers_ends_at_the_limit(tmp_path: Path) -> None:
    """Threads of the controller wait for it; they are daemons."""
    rewards = scorers(tmp_path, "time.sleep(5)", num_workers=0)
    rewards._threads = 2
    late = scored_late(watchdog(tmp_path, reward=0.3), rewards)
    assert "in in_threads" in late.last_words
    assert all(thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread())


def test_block_within_its_limit_is_not_interrupted(tmp_path: Path) -> None:
    limits = watchdog(tmp_path, reward=0.2)
    for _ in range(3):
        with limits.own("reward", "scoring", ""):
            pass
    time.sleep(0.3)
    signal.raise_signal(module._EXPIRED)  # a signal that comes too late
    with pytest.raises(KeyError), limits.own("reward", "scoring", ""):
        raise KeyError
    assert not (tmp_path / "logs").exists()


def test_block_that_ends_during_its_report_is_not_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reporting = threading.Event()

    def slow(*args: object) -> str:
        reporting.set()
        time.sleep(0.2)
        return ""

    limits = watchdog(tmp_path, reward=0.05)
    monkeypatch.setattr(limits, "_report", slow)
    with limits.own("reward", "scoring", ""):
        assert reporting.wait(5)
    time.sleep(0.4)


def test_unwritable_disk_does_not_hide_the_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(PhaseTimeout, match=r"not kept: .*Not a directory"),
        watchdog(tmp_path / "file", reward=0.1).own("reward", "scoring", ""),
    ):
        time.sleep(5)


def test_hanging_c_code_ends_the_process_with_its_stacks(tmp_path: Path) -> None:
    code = f"""
import ctypes
from pathlib import Path
from tests.trainer.watchdogs import watchdog
from trainer.cluster import watchdog as module
module.EXIT_SECONDS = 0.5
with watchdog(Path({str(tmp_path)!r}), reward=0.2).own("reward", "scoring", ""):
    while True:
        ctypes.PyDLL(None).sleep(600)
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 1 and "line 9 in <module>" in run.stderr
