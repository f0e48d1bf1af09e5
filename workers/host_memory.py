"""Available host memory: of the machine, or of a control group (a container, a batch job) that limits it further."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

GB = 1e9
CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Memory:
    """Available and total bytes. whose: «machine» or «control group», for messages."""

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


def host_memory() -> Memory:
    """Memory of the machine or of an enclosing control group, whichever has the smallest available share."""
    host = psutil.virtual_memory()
    return min([Memory(host.available, host.total, "machine"), *group_memory()], key=lambda memory: memory.share)


def group_memory(process: Path = Path("/proc/self/cgroup"), root: Path = CGROUPS) -> Iterator[Memory]:
    """Memory of each control group with a limit that contains this process, from the innermost outwards.

    File cache does not count as used: the kernel can reclaim it. process: file with lines ``id:controllers:path``; cgroup version
    2 has a single line without controllers. root: mount point of the cgroup file system.
    """
    for line in process.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top, names = (root, VERSION_2) if not controllers else (root / "memory", VERSION_1)
        inside = top / path.lstrip("/")
        for group in (inside, *inside.parents):  # a container may see a path of the host, which does not exist here
            if group.is_relative_to(top):
                yield from _memory_of(group, names)


VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
VERSION_2 = ("memory.max", "memory.current", "inactive_file")


def _memory_of(group: Path, names: tuple[str, str, str]) -> Iterator[Memory]:
    """Yield the memory of one control group; nothing if it has no limit."""
    # A limit of at least the machine's memory is no limit: version 1 writes a huge number where version 2 writes «max».
    limit_file, usage_file, cached = names
    limit = (group / limit_file).read_text().strip() if (group / limit_file).exists() else "max"
    if limit == "max" or int(limit) >= psutil.virtual_memory().total:
        return
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    used = int((group / usage_file).read_text()) - int(stat[cached])
    yield Memory(max(int(limit) - used, 0), int(limit), "control group")
