"""Stop a run early without losing work: on a signal, before the walltime ends, or when memory or disk run short.

A run that is killed in a step loses everything since its last checkpoint. Therefore each reason to stop is checked between steps:
the loop then saves a checkpoint and leaves. A signal only sets a flag, and the running step is completed, unless ``hurry`` makes
the loop abandon it. A second SIGTERM and Ctrl-C keep their usual effect, for users who do not want to wait.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from math import inf
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import psutil

from configs.base.walltime import seconds_of
from configs.schema.common import RunConfig
from trainer.resilience.host_monitor import HostMonitor
from trainer.run.errors import Stopped
from trainer.run.events import Events
from trainer.run.run_dir import resume_hint
from trainer.run.timing import WHOLE_STEP

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

    def __init__(self, trainer: RunConfig, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.furthest = -1  # the last complete step of any attempt
        self.hurry: Callable[[], None] = lambda: None  # called at the first signal, to cut short what the loop waits for
        self._watch = HostMonitor(trainer.watch, run_dir)
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

    def is_due(self, step: int, seconds: Mapping[str, float], save: float, events: Events) -> bool:
        """Whether the run has to stop now. Called before each step.

        step: the last complete step. seconds: its phases, empty before the first step. save: seconds of the longest save until
        everything was on disk, 0 if there was none.

        The walltime allows another step if the longest step and the longest save so far fit into the time that is left. Before
        the first save, a save is assumed to take as long as a step.
        """
        self._listen()
        self.furthest = max(self.furthest, step)
        self._longest_save = max(self._longest_save, save)
        self._longest_step = max(self._longest_step, seconds.get(WHOLE_STEP, 0.0) + seconds.get("testing", 0.0))
        for kind, text in self._watch.warnings():
            events.add(step, kind, text)
        # In this order: a signal decides the exit code even if the time is up as well.
        self._reason = self._asked() or self._out_of_time() or self._running_short()
        if self._reason is not None:
            events.add(step, "stop", self._reason[1])
        return self._reason is not None

    def check(self, *, after_failure: bool = False) -> None:
        """Raise Stopped if the run was stopped. fell: an attempt failed in a step; a signal received in that step counts too."""
        reason = self._reason or (self._asked() if after_failure else None)
        if reason is None:
            return
        raise Stopped(reason[0], f"stopped after step {self.furthest}: {reason[1]}; {resume_hint(self.run_dir)}")

    def _listen(self) -> None:
        if not self._before:
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:  # a batch system may send its warning again
            return
        # From here on a second SIGTERM has its previous effect. os.write: the signal may have interrupted a print, and buffered
        # streams are not reentrant.
        signal.signal(signal.SIGTERM, self._before[signal.SIGTERM])
        self._signal = signal.Signals(number)
        os.write(
            2, f"{self._signal.name}: the run ends after this step, with a checkpoint; a second SIGTERM ends it now\n".encode()
        )
        self.hurry()

    def _asked(self) -> tuple[int, str] | None:
        return None if self._signal is None else (128 + self._signal, self._signal.name)

    def _out_of_time(self) -> tuple[int, str] | None:
        step, save, left = self._longest_step, self._longest_save or self._longest_step, self._ends - time.time()
        if step + save <= left:
            return None
        needed = f"the longest step ({step:.1f} s) and save ({save:.1f} s)"
        return OUT_OF_TIME, f"{needed} do not fit into the {max(left, 0.0):.1f} s left of trainer.walltime={self._walltime}"

    def _running_short(self) -> tuple[int, str] | None:
        shortage = self._watch.shortage()
        return None if shortage is None else (RUNNING_SHORT, shortage)
