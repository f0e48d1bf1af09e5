"""What is left of memory and disk, and when that is too little."""

import os
from pathlib import Path

import psutil
import pytest

from configs.schema.common import WatchConfig
from trainer.watch import Memory, Watch, group_memory, host_memory

NEVER = {"memory_warn": 0.0, "memory_stop": 0.0, "disk_warn_gb": 0.0, "disk_stop_gb": 0.0}
MB = 2**20


def watch(run_dir: Path, **limits: float) -> Watch:
    return Watch(WatchConfig(**(NEVER | limits)), run_dir)


def free_gb(path: Path) -> float:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize / 1e9


def checkpoint(run_dir: Path, step: int, megabytes: int) -> None:
    path = run_dir / f"global_step_{step}" / "actor" / "shard"
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(megabytes * 10**6)  # a hole: it counts, and takes nothing


def test_nothing_is_said_where_all_is_off_or_well(tmp_path: Path) -> None:
    for quiet in (watch(tmp_path), watch(tmp_path, memory_warn=1e-6, memory_stop=1e-6, disk_warn_gb=1e-6, disk_stop_gb=1e-6)):
        assert list(quiet.warnings()) == [] and quiet.shortage() is None


def test_each_warning_comes_once(tmp_path: Path) -> None:
    anxious = watch(tmp_path, memory_warn=1.0, disk_warn_gb=free_gb(tmp_path) + 100)
    (memory, said), (disk, told) = anxious.warnings()
    assert (memory, disk) == ("low memory", "low disk")
    assert "memory are available" in said and said.endswith("less than trainer.watch.memory_warn=1")
    assert f"free where {tmp_path} is, less than trainer.watch.disk_warn_gb=" in told
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


def version_2(root: Path, path: str, limit: int | str, current: int, cached: int) -> None:
    (root / path).mkdir(parents=True, exist_ok=True)
    (root / path / "memory.max").write_text(f"{limit}\n")
    (root / path / "memory.current").write_text(f"{current}\n")
    (root / path / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\nactive_file 7\n")


def groups(tmp_path: Path, line: str) -> list[Memory]:
    (tmp_path / "cgroup").write_text(f"{line}\n")
    return list(group_memory(tmp_path / "cgroup", tmp_path / "fs"))


def test_a_containers_limit_counts_and_its_cached_files_do_not(tmp_path: Path) -> None:
    version_2(tmp_path / "fs", ".", limit="max", current=0, cached=0)
    version_2(tmp_path / "fs", "job", limit=100 * MB, current=90 * MB, cached=20 * MB)
    version_2(tmp_path / "fs", "job/step", limit=64 * MB, current=16 * MB, cached=0)
    expected = [Memory(48 * MB, 64 * MB, "control group"), Memory(30 * MB, 100 * MB, "control group")]
    assert groups(tmp_path, "0::/job/step") == expected
    assert groups(tmp_path, "0::/job") == expected[1:]


def test_a_path_that_only_the_host_knows_is_the_containers_top(tmp_path: Path) -> None:
    version_2(tmp_path / "fs", ".", limit=100 * MB, current=95 * MB, cached=0)
    assert groups(tmp_path, "0::/kubepods/pod7/abc") == [Memory(5 * MB, 100 * MB, "control group")]


def test_version_1_of_control_groups(tmp_path: Path) -> None:
    job = tmp_path / "fs" / "memory" / "slurm"
    job.mkdir(parents=True)
    (job / "memory.limit_in_bytes").write_text(f"{100 * MB}\n")
    (job / "memory.usage_in_bytes").write_text(f"{70 * MB}\n")
    (job / "memory.stat").write_text(f"cache 1\ntotal_inactive_file {10 * MB}\n")
    assert groups(tmp_path, "9:cpu:/slurm\n4:memory:/slurm\n0::/") == [Memory(40 * MB, 100 * MB, "control group")]


def test_a_limit_above_the_machine_is_none(tmp_path: Path) -> None:
    version_2(tmp_path / "fs", ".", limit=psutil.virtual_memory().total + 1, current=1, cached=0)
    assert groups(tmp_path, "0::/") == []


def test_the_shortest_of_all_is_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tight = Memory(1, 100, "control group")
    monkeypatch.setattr("trainer.watch.group_memory", lambda: [Memory(99, 100, "control group"), tight])
    assert host_memory() is tight
    monkeypatch.setattr("trainer.watch.group_memory", lambda: [])
    assert host_memory().whose == "machine"
