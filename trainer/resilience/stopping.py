"""Stop a run early without losing work: on a signal, before the walltime ends, or when memory or disk run short.

A run that is killed in a step loses everything since its last checkpoint. Therefore each reason to stop is checked between steps:
the loop then saves a checkpoint and leaves. A signal only sets a flag, and the running step is completed, unless ``hurry`` makes
the loop abandon it. A second SIGTERM and Ctrl-C keep their usual effect, for users who do not want to wait.
"""

from __future__ import annotations

import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from math import inf
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, ClassVar

import psutil

from configs.schema.common import RunConfig, WatchConfig, is_ever, seconds_of
from trainer.run.errors import Stopped
from trainer.run.events import Events
from trainer.run.run_dir import checkpoint_dir, checkpoint_steps, resume_hint
from trainer.run.timing import WHOLE_STEP
from workers.controller.logs import tell
from workers.host_memory import GB, host_memory

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
OUT_OF_TIME, RUNNING_SHORT = 0, 4
"""Exit codes; a run stopped by signal n ends with 128 + n."""


class Stopping:
    """Decides whether another step may begin. One instance serves a run including its restarts::

        with stopping:
            for step in ...:
                if stopping.is_due(...): save, and leave
        stopping.check()

    From the first call of ``is_due`` on, the first SIGTERM or SIGUSR1 in the block takes effect at the end of the step. A second
    SIGTERM, and Ctrl-C at any time, do what they did before the block.
    """

    received: ClassVar[signal.Signals | None] = None
    """The first signal in this process, also if it came too late to stop the run: what follows the run does not begin."""

    def __init__(self, trainer: RunConfig, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.furthest = -1  # the last complete step of any attempt
        # Called at the first signal, to cut short what the loop waits for; returns that and its time limit, for the user.
        self.hurry: Callable[[], str] = lambda: ""
        self._watch = HostMonitor(trainer.watch, run_dir, saves=is_ever(trainer.save_freq))
        # From the start of the process: imports and checks are part of a batch system's limit too.
        self._ends = inf if trainer.walltime is None else psutil.Process().create_time() + seconds_of(trainer.walltime)
        self._walltime = trainer.walltime
        self._longest_step = self._longest_save = 0.0
        self._before: dict[signal.Signals, Any] = {}
        self._signal: signal.Signals | None = None
        self._reason: tuple[int, str] | None = None

    def __enter__(self) -> None:
        # is_due installs the handlers: before the first step there is nothing to save, and a signal ends the start at once.
        self._before = {}

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def is_due(self, step: int, seconds: Mapping[str, float], save: float, events: Events, further: int = 1) -> bool:
        """Whether the run has to stop now. Called before each step.

        step: the last complete step. seconds: its phases, empty before the first step. save: seconds of the longest save until
        everything was on disk, 0 if there was none. further: steps after which the run can stop again, at most.

        The walltime allows further steps if ``further`` times the longest step and the longest save so far fit into the time that
        is left. Before the first save, a save is assumed to take as long as a step.
        """
        self._listen()
        self.furthest = max(self.furthest, step)
        self._longest_save = max(self._longest_save, save)
        self._longest_step = max(self._longest_step, seconds.get(WHOLE_STEP, 0.0) + seconds.get("testing", 0.0))
        for kind, text in self._watch.warnings():
            events.add(step, kind, text)
        # In this order: a signal decides the exit code even if the time is up as well.
        before, self._reason = self._reason, self._asked() or self._out_of_time(further) or self._running_short()
        if self._reason is not None and before is None:
            events.add(step, "stop", self._reason[1])
        return self._reason is not None

    def check(self, *, after_failure: bool = False) -> None:
        """Raise Stopped if the run was stopped.

        after_failure: an attempt failed in a step; a signal received in that step counts too.
        """
        reason = self._reason or (self._asked() if after_failure else None)
        if reason is None:
            return
        raise Stopped(reason[0], f"stopped after step {self.furthest}: {reason[1]}; {resume_hint(self.run_dir)}")

    def withdraw(self) -> None:
        """Forget that the run has to stop: it has ended by itself."""
        self._reason = None

    def _listen(self) -> None:
        if not self._before:
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:  # a batch system may send its warning again
            return
        # From here on a second SIGTERM has its previous effect.
        signal.signal(signal.SIGTERM, self._before[signal.SIGTERM])
        self._signal = Stopping.received = signal.Signals(number)
        waits = self.hurry()
        line = f"{self._signal.name}: the run ends after this step, with a checkpoint; a second SIGTERM ends it now"
        # From a thread: the signal may have interrupted a print, and buffered streams are not reentrant.
        threading.Thread(target=tell, args=(line + (f"; it waits for {waits}" if waits else ""),)).start()

    def _asked(self) -> tuple[int, str] | None:
        return None if self._signal is None else (128 + self._signal, self._signal.name)

    def _out_of_time(self, further: int) -> tuple[int, str] | None:
        step, save, left = self._longest_step, self._longest_save or self._longest_step, self._ends - time.time()
        if further * step + save <= left:
            return None
        steps = f"{further} times " if further > 1 else ""
        needed = f"{steps}the longest step ({step:.1f} s) and save ({save:.1f} s)"
        return OUT_OF_TIME, f"{needed} do not fit into the {max(left, 0.0):.1f} s left of trainer.walltime={self._walltime}"

    def _running_short(self) -> tuple[int, str] | None:
        shortage = self._watch.shortage()
        return None if shortage is None else (RUNNING_SHORT, shortage)


class HostMonitor:
    """Checked once per step, at the cost of a few reads of /proc and /sys. Monitors only the controller's machine."""

    def __init__(self, config: WatchConfig, run_dir: Path, *, saves: bool = True) -> None:
        """saves: whether room is kept for a checkpoint; one that is written because the run stops may fail without it."""
        self.config = config
        self.run_dir = run_dir
        self._saves = saves
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
            two = f" or two checkpoints of {checkpoint / GB:.3g} GB" if checkpoint else ""
            less = f"trainer.watch.disk_warn_gb={config.disk_warn_gb:g}{two}"
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
        """(free bytes, bytes that the next checkpoint needs: those of the newest one; 0 if no room is kept for one).

        Infinite if the run directory is gone: the next save reports that.
        """
        if not self.run_dir.is_dir():
            return inf, 0
        free, steps = shutil.disk_usage(self.run_dir).free, checkpoint_steps(self.run_dir) if self._saves else []
        # Walk a checkpoint once, and not at each step.
        if steps and steps[-1] not in self._sizes:
            files = [path for path in checkpoint_dir(self.run_dir, steps[-1]).rglob("*") if path.is_file()]
            self._sizes = {steps[-1]: sum(path.stat().st_size for path in files)}
        return free, self._sizes[steps[-1]] if steps else 0
