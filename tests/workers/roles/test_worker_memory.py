"""Available memory, of the machine and of control groups."""

from pathlib import Path

import psutil
import pytest

from workers.host_memory import Memory, group_memory, host_memory

MB = 2**20


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
    monkeypatch.setattr("workers.host_memory.group_memory", lambda: [Memory(99, 100, "control group"), tight])
    assert host_memory() is tight
    monkeypatch.setattr("workers.host_memory.group_memory", lambda: [])
    assert host_memory().whose == "machine"
