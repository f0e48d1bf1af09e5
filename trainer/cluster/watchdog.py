"""Time limits of phases, and reports of those that exceed them. Every call on workers passes through here.

A limit is what the group ``timeouts`` has; once a phase has been measured three times it may also take ten times the longest
of these, so that a slow machine is not taken for a hang. When a limit passes, the state of every rank is recorded
(hang_report.py) and PhaseTimeout is raised. Work of the controller itself is interrupted by a signal; if C code does not
return, the process ends.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from trainer.cluster.hang_report import CONTROLLER, Stall, ended_in_collective, record, summary, verdict
from trainer.run.events import Events
from workers.controller.group import Future, PhaseTimeout, WorkerError, WorkerGroup
from workers.controller.logs import USERS
from workers.controller.process_inspection import RankState, examine
from workers.controller.stacks import enable_stack_reports

MEASURED = 3  # number of measurements from which a limit may be widened
WIDENED = 10.0  # the widened limit, in multiples of the longest duration
MOST_CALLS = 1000  # calls that are kept for take_calls
LOOK = 0.005  # seconds between polls of calls on several groups
NEWS_SECONDS = 3.0  # to learn a group's own error, after another group has lost it
LOST = "ChannelLost"  # workers/rollout/sync/channel.py: the error of another rank is the cause
HURRIED = 5.0  # seconds that scoring may still take after a signal to stop; or its longest duration, if that is more
LAST_RESORT = 60.0  # seconds after the limit: the process ends if it could not be interrupted
_EXPIRED = signal.SIGRTMIN + 6


@dataclass(frozen=True, slots=True)
class Call:
    """A call on the workers of a pool: from ``start``, in seconds since 1970, to the end of each rank."""

    what: str
    pool: str
    start: float
    ends: tuple[float, ...]


class LeftUndone(Exception):
    """Work of this process was abandoned, because the run is stopping: see Watchdog.hurry."""


class Watchdog:
    """Applies the limits of phases to calls on workers, and to work of this process."""

    def __init__(self, limits: Mapping[str, float], run_dir: Path) -> None:
        """limits: the group ``timeouts``, in seconds by phase. For the main thread, except ``call``."""
        enable_stack_reports()
        self.step = 0
        """Current step of the run, for reports."""
        self._calls: deque[Call] = deque(maxlen=MOST_CALLS)
        self._limits = limits
        self._run_dir = run_dir
        self._events = Events(run_dir)
        self._seen: dict[str, tuple[int, float]] = {}
        self._lock = threading.Lock()
        """Calls come from several threads if pools work concurrently."""
        self._hurried = False
        self._own: tuple[_Alarm, float] | None = None
        """Alarm of the work in progress, and the time.monotonic() at which it exceeds all earlier durations."""

    def limit(self, phase: str) -> float:
        """Seconds that a phase may take: as configured, or 10 x the longest of at least three durations, if that is more."""
        count, longest = self._seen.get(phase, (0, 0.0))
        return max(self._limits[phase], WIDENED * longest) if count >= MEASURED else self._limits[phase]

    def call(
        self,
        group: WorkerGroup,
        phase: str,
        what: str,
        method: str,
        *args: Any,
        mesh: str | None = None,
        work: Callable[[], Sequence[str]] = list,
    ) -> list[Any]:
        """Result of ``group.call(method, *args)``. what: the phase, for the user. work: by rank, what it works on.

        Raises WorkerError, and PhaseTimeout when the phase, or a collective in it, has taken too long; both contain ``what``.
        """
        limit, started = self.limit(phase), time.monotonic()
        # Measured after success only: a phase that was late must not widen its own limit.
        result = self._result(lambda: group.call(method, *args, mesh=mesh, timeout=limit), phase, what, work, group.name)
        self._saw(phase, time.monotonic() - started)
        return result

    def take_calls(self) -> list[Call]:
        """Calls that have ended since the last time, the latest MOST_CALLS of them."""
        taken = list(self._calls)
        self._calls.clear()
        return taken

    def together(self, phase: str, *calls: tuple[WorkerGroup, str, tuple[Any, ...]]) -> list[list[Any]]:
        """Results of calls on groups that wait for one another, within the time for one. calls: (group, what, call).

        Raises what ``call`` does as soon as one group has failed; if that group only lost another one, the error of the
        other.
        """
        limit, started = self.limit(phase), time.monotonic()
        pools = {what: group.name for group, what, _ in calls}
        waiting = [(what, group.call(*words, timeout=limit)) for group, what, words in calls]
        results: dict[str, list[Any]] = {}
        while waiting:
            over = time.monotonic() > started + limit
            # Polled, because waiting for one group would delay the error of another. After the limit all calls are asked,
            # and raise PhaseTimeout.
            for what, future in [one for one in waiting if over or one[1].done()]:
                waiting.remove((what, future))
                try:
                    results[what] = self._answer(future, phase, what, pools[what])
                except (WorkerError, PhaseTimeout) as error:
                    raise self._cause(error, phase, waiting) from None
            time.sleep(LOOK)
        self._saw(phase, time.monotonic() - started)
        return [results[what] for _, what, _ in calls]

    def _cause(
        self, error: WorkerError | PhaseTimeout, phase: str, others: Sequence[tuple[str, Future]]
    ) -> WorkerError | PhaseTimeout:
        """The error to report after a group failed while others had not answered.

        The rank that is late may be in one of the others: after a timeout their states are reported too.
        """
        if isinstance(error, PhaseTimeout):
            error.last_words += "".join(f"\n{what}: {self._tell(phase, what, future.examine(), list)}" for what, future in others)
            return error
        deadline = time.monotonic() + NEWS_SECONDS
        while error.kind == LOST and others and time.monotonic() < deadline:
            for what, future in others:
                if future.done():
                    try:
                        self._answer(future, phase, what)
                    except (WorkerError, PhaseTimeout) as cause:
                        return cause
            time.sleep(LOOK)
        return error

    def _answer(self, future: Future, phase: str, what: str, pool: str = "") -> list[Any]:
        return self._result(lambda: future, phase, what, pool=pool)

    def _result(
        self, ask: Callable[[], Future], phase: str, what: str, work: Callable[[], Sequence[str]] = list, pool: str = ""
    ) -> list[Any]:
        """Wait for a call and record it. Errors get ``what`` as their method, and timeouts a report."""
        try:
            future = ask()
            result = future.result()
            self._calls.append(Call(what.partition(" (")[0], pool, future.begun, tuple(future.ended)))
            return result
        except WorkerError as error:
            error.method = what
            if ended_in_collective(str(error)):
                raise self._stuck(future, error, phase, what, work) from error
            raise
        except PhaseTimeout as error:
            error.method = self._limited(what, phase)
            error.last_words = self._tell(phase, what, error.states, work)
            raise

    @contextmanager
    def own(self, phase: str, what: str, work: str) -> Iterator[None]:
        """Limit work of this process, or of children that it waits for.

        Raises PhaseTimeout wherever the work is when its time is over, or LeftUndone if that is after ``hurry`` and the work
        has taken longer than ever before (see HURRIED). Nothing can be raised while C code does not return: then the process
        ends with its stacks and exit status 1.
        """
        limit, started = self.limit(phase), time.monotonic()

        def report() -> str:
            return "" if self._hurried else self._tell(phase, what, controller_state(), lambda: [work])

        patience = min(limit, max(HURRIED, self._seen.get(phase, (0, 0.0))[1]))
        alarm = _Alarm(patience if self._hurried else limit, report)
        self._own = (alarm, started + patience)
        faulthandler.dump_traceback_later(limit + LAST_RESORT, exit=True, file=USERS[-1])
        try:
            with alarm:
                yield
        except _Expired:
            if self._hurried:
                raise LeftUndone(what) from None
            raise PhaseTimeout(self._limited(what, phase), [], limit, alarm.told) from None
        finally:
            faulthandler.cancel_dump_traceback_later()
            self._own = None
        self._saw(phase, time.monotonic() - started)

    def hurry(self) -> None:
        """From now on abandon work of this process that takes long, see ``own``. May be called by a signal handler."""
        self._hurried = True
        if self._own is not None:
            alarm, due = self._own
            alarm.ring_in(max(HURRIED, due - time.monotonic()))

    def _saw(self, phase: str, seconds: float) -> None:
        """Record the duration of a phase."""
        with self._lock:
            count, longest = self._seen.get(phase, (0, 0.0))
            self._seen[phase] = count + 1, max(longest, seconds)

    def _limited(self, what: str, phase: str) -> str:
        """``what`` with its limit and the key of that limit."""
        widened = ", widened by what was measured" if self.limit(phase) > self._limits[phase] else ""
        return f"{what}, limited by timeouts.{phase}={self._limits[phase]:g}{widened},"

    def _stuck(
        self, future: Future, error: WorkerError, phase: str, what: str, work: Callable[[], Sequence[str]]
    ) -> PhaseTimeout:
        """PhaseTimeout after a rank gave up waiting in a collective: the others are late, not that rank."""
        states = future.examine()
        late = verdict(states, [error.rank]).ranks
        words = self._tell(phase, what, states, work, [error.rank])
        limited = f"a collective in {what}, limited by timeouts.collective={self._limits['collective']:g},"
        return PhaseTimeout(limited, late, self._limits["collective"], words)

    def _tell(
        self,
        phase: str,
        what: str,
        states: Sequence[RankState],
        work: Callable[[], Sequence[str]],
        waited: Sequence[int] = (),
    ) -> str:
        """Write a report and an event. Returns the summary."""
        stall = Stall(self.step, phase, states, work(), verdict(states, waited))
        try:
            with self._lock:
                directory = str(record(stall, self._run_dir))
            blamed = f", held up by ranks {stall.verdict.ranks}" if stall.verdict.why else ""
            self._events.add(self.step, "stall", f"{what} took too long{blamed}: see {directory}")
        except OSError as error:  # the disk may be the cause
            directory = f"not kept: {error}"
        return summary(stall, self._run_dir, directory)


class _Expired(BaseException):
    """Raised in the main thread. Not an Exception, so that `except Exception` of a user's function does not catch it."""


class _Alarm:
    """Within the block, raise _Expired in the main thread after ``seconds``, wherever it is. ``tell`` is called first."""

    def __init__(self, seconds: float, tell: Callable[[], str]) -> None:
        self.told = ""
        self._tell = tell
        self._timer = threading.Timer(seconds, self._ring)
        self._timer.daemon = True
        self._lock = threading.Lock()
        self._armed = True

    def __enter__(self) -> None:
        signal.signal(_EXPIRED, self._expire)
        self._timer.start()

    def ring_in(self, seconds: float) -> None:
        """Start a second timer: a signal handler must not wait for the lock of the first, which it may have interrupted."""
        timer = threading.Timer(seconds, self._ring)
        timer.daemon = True
        timer.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._timer.cancel()
        with self._lock:
            self._armed = False

    def _ring(self) -> None:
        try:
            # First, while the main thread is still where it hangs.
            self.told = self._tell()
        finally:
            with self._lock:
                if self._armed:
                    # Under the lock, so that the block cannot end between the check and the signal.
                    signal.pthread_kill(threading.main_thread().ident or 0, _EXPIRED)

    def _expire(self, number: int, frame: FrameType | None) -> None:
        """The handler stays installed after the block: without one, a late signal would end the process."""
        if self._armed:
            raise _Expired


def controller_state() -> list[RankState]:
    """State of this process and its descendants."""
    return [RankState(CONTROLLER, False, examine([os.getpid()])[0], None, ())]
