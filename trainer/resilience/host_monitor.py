"""Monitor host memory and the run directory's disk from the controller: warn when they run low, stop when they are too low."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from math import inf
from pathlib import Path

from configs.schema.common import WatchConfig
from trainer.run.run_dir import checkpoint_dir, checkpoint_steps
from workers.host_memory import GB, host_memory


class HostMonitor:
    """Checked once per step, at the cost of a few reads of /proc and /sys. Monitors only the controller's machine."""

    def __init__(self, config: WatchConfig, run_dir: Path) -> None:
        self.config = config
        self.run_dir = run_dir
        self._reported: set[str] = set()
        self._sizes: dict[int, int] = {}

    def warnings(self) -> Iterator[tuple[str, str]]:
        """Yield (kind, text) of each warning, every kind once per run."""
        memory, config = host_memory(), self.config
        if "low memory" not in self._reported and memory.share < config.memory_warn:
            self._reported.add("low memory")
            yield "low memory", f"{memory}, less than trainer.watch.memory_warn={config.memory_warn:g}"
        # Warn early, while there is room for two more checkpoints; disk_warn_gb=0 turns off both conditions.
        free, checkpoint = self.disk()
        if "low disk" not in self._reported and free < max(
            config.disk_warn_gb * GB, 2 * checkpoint if config.disk_warn_gb else 0
        ):
            self._reported.add("low disk")
            less = f"trainer.watch.disk_warn_gb={config.disk_warn_gb:g} or two checkpoints of {checkpoint / GB:.3g} GB"
            yield "low disk", f"{free / GB:.3g} GB are free where {self.run_dir} is, less than {less}"

    def shortage(self) -> str | None:
        """The reason to save and stop now, while that is still possible, or None.

        The disk must have room for one more checkpoint plus ``disk_stop_gb``: stopping saves a checkpoint.
        """
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
        """(free bytes, bytes of the newest checkpoint). Infinite if the run directory is gone: the next save reports that."""
        if not self.run_dir.is_dir():
            return inf, 0
        free, steps = shutil.disk_usage(self.run_dir).free, checkpoint_steps(self.run_dir)
        # Walk a checkpoint once, and not at each step.
        if steps and steps[-1] not in self._sizes:
            files = [path for path in checkpoint_dir(self.run_dir, steps[-1]).rglob("*") if path.is_file()]
            self._sizes = {steps[-1]: sum(path.stat().st_size for path in files)}
        return free, self._sizes[steps[-1]] if steps else 0
