"""The host's memory and the run directory's disk, watched from the controller: what is left, and whether that is too little."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path

import psutil

from configs.schema.common import WatchConfig
from trainer.run_dir import checkpoint_dir, checkpoint_steps

GB = 1e9
CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes. whose: of the machine, or of a control group (a container, a batch job)."""

    available: int
    total: int
    whose: str

    @property
    def share(self) -> float:
        return self.available / self.total

    def __str__(self) -> str:
        return (
            f"{self.available / GB:.3g} of {self.total / GB:.3g} GB of the {self.whose}'s memory are available ({self.share:.1%})"
        )


class Watch:
    """Looked at once a step: some reads of /proc and /sys. Of several machines it sees the controller's."""

    def __init__(self, config: WatchConfig, run_dir: Path) -> None:
        self.config = config
        self.run_dir = run_dir
        self._told: set[str] = set()
        self._sizes: dict[int, int] = {}

    def warnings(self) -> Iterator[tuple[str, str]]:
        """(kind, text), each kind once."""
        memory, config = host_memory(), self.config
        if "low memory" not in self._told and memory.share < config.memory_warn:
            self._told.add("low memory")
            yield "low memory", f"{memory}, less than trainer.watch.memory_warn={config.memory_warn:g}"
        free, checkpoint = self.disk()
        if "low disk" not in self._told and free < max(config.disk_warn_gb * GB, 2 * checkpoint if config.disk_warn_gb else 0):
            self._told.add("low disk")
            less = f"trainer.watch.disk_warn_gb={config.disk_warn_gb:g} or two checkpoints of {checkpoint / GB:.3g} GB"
            yield "low disk", f"{free / GB:.3g} GB are free where {self.run_dir} is, less than {less}"

    def shortage(self) -> str | None:
        """Why the run should save and stop now, while it can. The disk must hold one more checkpoint, and then disk_stop_gb."""
        memory, config = host_memory(), self.config
        if memory.share < config.memory_stop:
            return f"{memory}, less than trainer.watch.memory_stop={config.memory_stop:g}"
        free, checkpoint = self.disk()
        if config.disk_stop_gb and free - checkpoint < config.disk_stop_gb * GB:
            return (
                f"{free / GB:.3g} GB are free where {self.run_dir} is: after a checkpoint of {checkpoint / GB:.3g} GB less than "
                f"trainer.watch.disk_stop_gb={config.disk_stop_gb:g}"
            )
        return None

    def disk(self) -> tuple[float, int]:
        """Bytes free, and of the newest checkpoint. A run directory that has vanished is no reason: saving tells of it."""
        if not self.run_dir.is_dir():
            return inf, 0
        free, steps = shutil.disk_usage(self.run_dir).free, checkpoint_steps(self.run_dir)
        if steps and steps[-1] not in self._sizes:
            files = [path for path in checkpoint_dir(self.run_dir, steps[-1]).rglob("*") if path.is_file()]
            self._sizes = {steps[-1]: sum(path.stat().st_size for path in files)}
        return free, self._sizes[steps[-1]] if steps else 0


def host_memory() -> Memory:
    """Where it is shortest: the machine's, or that of a control group around this process."""
    host = psutil.virtual_memory()
    return min([Memory(host.available, host.total, "machine"), *group_memory()], key=lambda memory: memory.share)


def group_memory(process: Path = Path("/proc/self/cgroup"), root: Path = CGROUPS) -> Iterator[Memory]:
    """Of each control group with a limit that this process is in, from the innermost out. What files are cached can be had back.

    process: lines ``id:controllers:path``; of version 2 there is one, without controllers.
    """
    for line in process.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top, names = (root, VERSION_2) if not controllers else (root / "memory", VERSION_1)
        inside = top / path.lstrip("/")
        for group in (inside, *inside.parents):  # within a container the path may be one that only the outside knows: not there
            if group.is_relative_to(top):
                yield from _memory_of(group, names)


VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
VERSION_2 = ("memory.max", "memory.current", "inactive_file")


def _memory_of(group: Path, names: tuple[str, str, str]) -> Iterator[Memory]:
    limit_file, usage_file, cached = names
    limit = (group / limit_file).read_text().strip() if (group / limit_file).exists() else "max"
    if limit == "max" or int(limit) >= psutil.virtual_memory().total:
        return
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    used = int((group / usage_file).read_text()) - int(stat[cached])
    yield Memory(max(int(limit) - used, 0), int(limit), "control group")
