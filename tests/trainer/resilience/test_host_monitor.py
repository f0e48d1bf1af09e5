"""What is left of memory and disk, and when that is too little."""

import os
from pathlib import Path

from configs.schema.common import WatchConfig
from trainer.resilience.host_monitor import HostMonitor

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
        file.truncate(megabytes * 10**6)  # a hole: it counts, and takes nothing


def test_nothing_is_reported_where_all_is_off_or_well(tmp_path: Path) -> None:
    for quiet in (watch(tmp_path), watch(tmp_path, memory_warn=1e-6, memory_stop=1e-6, disk_warn_gb=1e-6, disk_stop_gb=1e-6)):
        assert list(quiet.warnings()) == [] and quiet.shortage() is None


def test_each_warning_comes_once(tmp_path: Path) -> None:
    anxious = watch(tmp_path, memory_warn=1.0, disk_warn_gb=free_gb(tmp_path) + 100)
    (memory, message), (disk, output) = anxious.warnings()
    assert (memory, disk) == ("low memory", "low disk")
    assert "memory are available" in message and message.endswith("less than trainer.watch.memory_warn=1")
    assert f"free where {tmp_path} is, less than trainer.watch.disk_warn_gb=" in output
    assert list(anxious.warnings()) == [] and anxious.shortage() is None


def test_memory_that_is_short_ends_the_run(tmp_path: Path) -> None:
    reason = watch(tmp_path, memory_stop=1.0).shortage()
    assert reason is not None and reason.endswith("less than trainer.watch.memory_stop=1")


def test_two_checkpoints_must_find_room(tmp_path: Path) -> None:
    free = free_gb(tmp_path)
    checkpoint(tmp_path, 2, megabytes=1)
    assert list(watch(tmp_path, disk_warn_gb=1e-6).warnings()) == []
    checkpoint(tmp_path, 10, megabytes=int(free * 0.6 * 1e3))
    ((kind, _),) = watch(tmp_path, disk_warn_gb=1e-6).warnings()
    assert kind == "low disk" and watch(tmp_path, disk_stop_gb=free * 0.2).shortage() is None
    reason = watch(tmp_path, disk_stop_gb=free * 0.6).shortage()
    assert reason is not None and "GB less than trainer.watch.disk_stop_gb=" in reason


def test_a_directory_that_is_gone_is_not_the_watchs_business(tmp_path: Path) -> None:
    gone = watch(tmp_path / "gone", disk_warn_gb=1e9, disk_stop_gb=1e9)
    assert list(gone.warnings()) == [] and gone.shortage() is None
