"""When another step may begin, and how signals are handled. Complete runs are stopped in ppo/test_loop_stops."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from configs.compose import compose
from configs.schema.common import WatchConfig
from configs.schema.ppo import PPOConfig
from trainer.resilience.stopping import SIGNALS, HostMonitor, Stopping
from trainer.run.errors import Stopped
from trainer.run.events import Events


def stopping(run_dir: Path, *overrides: str) -> Stopping:
    off = ("trainer.watch.memory_warn=0", "trainer.watch.memory_stop=0", "trainer.watch.disk_warn_gb=0")
    return Stopping(compose("ppo_trainer", PPOConfig, [*off, "trainer.watch.disk_stop_gb=0", *overrides]).trainer, run_dir)


def with_seconds_left(run_dir: Path, seconds: float) -> Stopping:
    return stopping(run_dir, f"trainer.walltime={time.time() - psutil.Process().create_time() + seconds:.3f}")


@contextmanager
def ignored() -> Iterator[None]:
    """A signal that is not caught in time must not end the tests."""
    before = [(number, signal.signal(number, signal.SIG_IGN)) for number in SIGNALS]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


@pytest.mark.parametrize(
    ("phases", "due"),
    [
        ([], False),
        ([({"step": 40.0}, 0.0)], False),  # and a save of the same duration: 80
        ([({"step": 51.0}, 0.0)], True),
        ([({"step": 40.0, "testing": 12.0}, 0.0)], True),
        ([({"step": 51.0, "save_checkpoint": 9.0}, 45.0)], False),
        ([({"step": 51.0, "save_checkpoint": 9.0}, 60.0)], True),  # written in the background
        ([({"step": 80.0}, 30.0), ({"step": 5.0}, 1.0)], True),  # the longest ones count
    ],
)
def test_step_begins_only_if_it_and_a_save_fit(tmp_path: Path, phases: list[tuple[dict[str, float], float]], due: bool) -> None:
    """With 100 seconds remaining."""
    clock = with_seconds_left(tmp_path, 100.0)
    with clock:
        found = [clock.is_due(step, seconds, save, Events(tmp_path)) for step, (seconds, save) in enumerate([({}, 0.0), *phases])]
    assert found[-1] is due
    if not due:
        clock.check()


@pytest.mark.parametrize(("further", "due"), [(1, False), (3, False), (4, True)])
def test_walltime_leaves_room_for_all_steps_up_to_the_next_stop(tmp_path: Path, further: int, due: bool) -> None:
    clock = with_seconds_left(tmp_path, 100.0)
    with clock:
        assert clock.is_due(1, {"step": 25.0}, 10.0, Events(tmp_path), further) is due


def test_end_of_the_walltime_is_reported_with_the_arithmetic(tmp_path: Path) -> None:
    clock = with_seconds_left(tmp_path, 10.0)
    (tmp_path / "global_step_7").mkdir()
    with clock:
        assert clock.is_due(7, {"step": 8.0}, 3.0, Events(tmp_path))
    with pytest.raises(
        Stopped, match=r"^stopped after step 7: the longest step \(8\.0 s\) and save \(3\.0 s\) do not fit into"
    ) as output:
        clock.check()
    assert output.value.code == 0 and str(output.value).endswith(f"resumes from {tmp_path / 'global_step_7'}")


def test_run_without_a_walltime_never_stops_for_time(tmp_path: Path) -> None:
    assert not stopping(tmp_path).is_due(1, {"step": 1e9}, 0.0, Events(tmp_path))


def test_signals_are_deferred_only_between_first_and_last_step(tmp_path: Path) -> None:
    """Before the first step, at the start of a restart, and after the last step, an immediate end loses nothing."""
    clock = stopping(tmp_path)
    with ignored():
        for _ in range(2):
            with clock:
                assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
                assert not clock.is_due(1, {}, 0.0, Events(tmp_path))
                assert callable(signal.getsignal(signal.SIGTERM)) and callable(signal.getsignal(signal.SIGUSR1))
            assert [signal.getsignal(number) for number in SIGNALS] == [signal.SIG_IGN, signal.SIG_IGN]
        clock.check()


@pytest.mark.parametrize("number", SIGNALS)
def test_first_signal_is_deferred_and_the_next_sigterm_reaches_the_previous_handler(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    clock = stopping(tmp_path)
    with ignored(), clock:
        assert not clock.is_due(3, {}, 0.0, Events(tmp_path))
        before = {*threading.enumerate()}
        os.kill(os.getpid(), number)
        while signal.getsignal(signal.SIGTERM) != signal.SIG_IGN:
            time.sleep(0.01)
        for thread in {*threading.enumerate()} - before:  # which prints; what it writes while the output is read would be lost
            thread.join()
        printed = capfd.readouterr().err
        assert printed == f"{number.name}: the run ends after this step, with a checkpoint; a second SIGTERM ends it now\n"
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
        os.kill(os.getpid(), signal.SIGUSR1)  # Slurm may send it again
    clock.check()  # it completed nevertheless
    with pytest.raises(Stopped) as output:
        clock.check(after_failure=True)
    assert output.value.code == 128 + number and "from the beginning: there is no checkpoint" in str(output.value)


def test_walltime_counts_from_the_start_of_the_program(tmp_path: Path) -> None:
    script = f"""
import time; time.sleep(1.5)
from pathlib import Path
from tests.trainer.resilience.test_stopping import stopping
from trainer.run.events import Events
print(stopping(Path({str(tmp_path)!r}), "trainer.walltime=1.4").is_due(0, {{}}, 0.0, Events(Path({str(tmp_path)!r}))))
"""
    message = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parents[3], capture_output=True, text=True, check=True
    )
    assert message.stdout == "True\n"


NEVER = {"memory_warn": 0.0, "memory_stop": 0.0, "disk_warn_gb": 0.0, "disk_stop_gb": 0.0}


def watch(run_dir: Path, **limits: float) -> HostMonitor:
    return HostMonitor(WatchConfig(**(NEVER | limits)), run_dir)


def free_gb(path: Path) -> float:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize / 1e9


def checkpoint(run_dir: Path, step: int, megabytes: int) -> None:
    path = run_dir / f"global_step_{step}" / "actor" / "shard"
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(megabytes * 10**6)  # a sparse file: it has the size, and takes no space


def test_nothing_is_reported_if_disabled_or_healthy(tmp_path: Path) -> None:
    for quiet in (watch(tmp_path), watch(tmp_path, memory_warn=1e-6, memory_stop=1e-6, disk_warn_gb=1e-6, disk_stop_gb=1e-6)):
        assert list(quiet.warnings()) == [] and quiet.shortage() is None


def test_each_warning_is_reported_once(tmp_path: Path) -> None:
    anxious = watch(tmp_path, memory_warn=1.0, disk_warn_gb=free_gb(tmp_path) + 100)
    (memory, message), (disk, output) = anxious.warnings()
    assert (memory, disk) == ("low memory", "low disk")
    assert "memory are available" in message and message.endswith("less than trainer.watch.memory_warn=1")
    assert f"free where {tmp_path} is, less than trainer.watch.disk_warn_gb=" in output
    assert list(anxious.warnings()) == [] and anxious.shortage() is None


def test_short_memory_ends_the_run(tmp_path: Path) -> None:
    reason = watch(tmp_path, memory_stop=1.0).shortage()
    assert reason is not None and reason.endswith("less than trainer.watch.memory_stop=1")


def test_disk_must_have_space_for_two_checkpoints(tmp_path: Path) -> None:
    free = free_gb(tmp_path)
    checkpoint(tmp_path, 2, megabytes=1)
    assert list(watch(tmp_path, disk_warn_gb=1e-6).warnings()) == []
    checkpoint(tmp_path, 10, megabytes=int(free * 0.6 * 1e3))
    ((kind, _),) = watch(tmp_path, disk_warn_gb=1e-6).warnings()
    assert kind == "low disk" and watch(tmp_path, disk_stop_gb=free * 0.2).shortage() is None
    reason = watch(tmp_path, disk_stop_gb=free * 0.6).shortage()
    assert reason is not None and "GB less than trainer.watch.disk_stop_gb=" in reason
    config = WatchConfig(**(NEVER | {"disk_warn_gb": 1e-6, "disk_stop_gb": free * 0.6}))
    unsaved = HostMonitor(config, tmp_path, saves=False)
    assert list(unsaved.warnings()) == [] and unsaved.shortage() is None, "such as a resumed run with trainer.save_freq=-1"


def test_missing_run_directory_is_ignored(tmp_path: Path) -> None:
    gone = watch(tmp_path / "gone", disk_warn_gb=1e9, disk_stop_gb=1e9)
    assert list(gone.warnings()) == [] and gone.shortage() is None
