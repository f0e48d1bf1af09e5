"""The host's memory and the run directory's disk, watched from the controller: what is left, and whether that is too little."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from math import inf
from pathlib import Path

from configs.schema.common import WatchConfig
from trainer.run.run_dir import checkpoint_dir, checkpoint_steps
from workers.host_memory import GB, host_memory


class HostMonitor:
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
