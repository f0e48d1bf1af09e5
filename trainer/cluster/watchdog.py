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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Generic, TypeVar

from trainer.cluster.hang_report import CONTROLLER, Stall, ended_in_collective, record, summary, verdict
from trainer.run.events import Events
from workers.controller.group import Future, Limit, PhaseTimeout, WorkerError, WorkerGroup, wait_any
from workers.controller.logs import USERS
from workers.controller.process_inspection import RankState, examine
from workers.controller.rpc import Call
from workers.controller.stacks import enable_stack_reports

MEASURED = 3  # number of measurements from which a limit may be widened
WIDENED = 10.0  # the widened limit, in multiples of the longest duration
MOST_SPANS = 512  # of one phase and the same ranks, see CallSpans; even
CAUSE_SECONDS = 3.0  # to learn a group's own error, after another group has lost it
LOST = "ChannelLost"  # workers/rollout/sync/channel.py: the error of another rank is the cause
HURRIED = 5.0  # seconds that scoring may still take after a signal to stop; or its longest duration, if that is more
EXIT_SECONDS = 60.0  # seconds after the limit: the process ends if it could not be interrupted
_EXPIRED = signal.SIGRTMIN + 6
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class CallSpan:
    """A call on the workers of a pool, or several neighbouring ones: from ``start``, in seconds since 1970.

    ends: by rank, the end of its last call; ``start`` for a rank that was not called. calls: number of calls in it.
    """

    what: str
    pool: str
    start: float
    ends: tuple[float, ...]
    calls: int = 1


class CallSpans:
    """Spans of calls, at most MOST_SPANS for each phase of the same ranks: a step may make thousands of calls.

    When there are more, neighbours are merged in pairs, so that the spans still cover the whole time evenly.
    """

    def __init__(self) -> None:
        self._spans: dict[tuple[str, str, frozenset[int]], list[CallSpan]] = {}
        self._each: dict[tuple[str, str, frozenset[int]], int] = {}
        """Calls in each span that is full."""

    def add(self, what: str, pool: str, start: float, ended: Mapping[int, float]) -> None:
        """ended: by rank that was called, in seconds since 1970."""
        ends = tuple(ended.get(rank, start) for rank in range(max(ended, default=-1) + 1))
        key = (what, pool, frozenset(ended))
        spans, each = self._spans.setdefault(key, []), self._each.setdefault(key, 1)
        new = CallSpan(what, pool, start, ends)
        if spans and spans[-1].calls < each:
            spans[-1] = merged(spans[-1], new)
            return
        if len(spans) == MOST_SPANS:
            self._spans[key] = spans = [merged(first, second) for first, second in zip(spans[::2], spans[1::2], strict=True)]
            self._each[key] = 2 * each
        spans.append(new)

    def taken(self) -> list[CallSpan]:
        """All spans, by their start."""
        return sorted((span for spans in self._spans.values() for span in spans), key=lambda span: span.start)


def merged(first: CallSpan, second: CallSpan) -> CallSpan:
    """One span for two of the same ranks, ``second`` after ``first``."""
    ends = tuple(new if new > second.start else old for old, new in zip(first.ends, second.ends, strict=True))
    return replace(first, ends=ends, calls=first.calls + second.calls)


class LeftUndone(Exception):
    """Work of this process was abandoned, because the run is stopping: see Watchdog.hurry."""


class Watchdog:
    """Applies the limits of phases to calls on workers, and to work of this process."""

    def __init__(self, limits: Mapping[str, float], run_dir: Path) -> None:
        """limits: the group ``timeouts``, in seconds by phase. For the main thread, except ``call``."""
        enable_stack_reports()
        self.step = 0
        """Current step of the run, for reports."""
        self._calls = CallSpans()
        self._limits = limits
        self._run_dir = run_dir
        self.events = Events(run_dir)
        self._durations: dict[str, tuple[int, float]] = {}
        self._lock = threading.Lock()
        """Calls come from several threads if pools work concurrently."""
        self._hurried = False
        self._own: tuple[_Alarm, float, str] | None = None
        """Alarm of the work in progress, the time.monotonic() at which it exceeds all earlier durations, and what it is."""
        self._waits: dict[str, str] = {}
        """Calls that this process waits for: {what: its limit, for messages}."""

    def limit(self, phase: str) -> Limit:
        """Limit of a phase: as configured, or 10 x the longest of at least three durations, if that is more."""
        configured = self._limits[phase]
        source = f"timeouts.{phase}={configured:g}"
        count, longest = self._durations.get(phase, (0, 0.0))
        if count < MEASURED or WIDENED * longest <= configured:
            return Limit(configured, source)
        return Limit(WIDENED * longest, f"{source}, widened by what was measured")

    def call(
        self,
        group: WorkerGroup,
        phase: str,
        what: str,
        call: Call[R],
        *,
        mesh: str | None = None,
        work: Callable[[], Sequence[str]] = list,
    ) -> list[R]:
        """Result of ``group.call(call)``. what: the phase, for the user. work: by rank, what it works on.

        Raises WorkerError, and PhaseTimeout when the phase, or a collective in it, has taken too long; both contain ``what``.
        """
        started = time.monotonic()
        with self._reported(phase, what, work):
            future = group.call(call, mesh=mesh, phase=what, limit=self.limit(phase))
        result = self._result(future, group.name, phase, what, work)
        # Measured after success only: a phase that was late must not widen its own limit.
        self._add_duration(phase, time.monotonic() - started)
        return result

    def start(
        self,
        group: WorkerGroup,
        phase: str,
        what: str,
        call: Call[R],
        *,
        mesh: str,
        replica: int,
        work: Callable[[], Sequence[str]] = list,
    ) -> StartedCall[R]:
        """Start a call on one replica; ``results`` waits for it. Limit and arguments as in ``call``."""
        started = time.monotonic()
        with self._reported(phase, what, work):
            future = group.call(call, mesh=mesh, replica=replica, phase=what, limit=self.limit(phase))
        return StartedCall(future, group.name, phase, what, work, replica, started)

    def results(self, calls: Collection[StartedCall[R]], *, every: bool) -> dict[StartedCall[R], R | WorkerError]:
        """Results of the calls that have ended, after waiting for the first one (every: for all). Raises what ``call`` does.

        The result of a call whose process died is the WorkerError: the others have not failed.
        """
        waiting = {call.future: call for call in calls}
        found: dict[StartedCall[R], R | WorkerError] = {}
        while waiting and (every or not found):
            for future in wait_any(list(waiting)):
                call = waiting.pop(future)
                try:
                    (found[call],) = self._result(future, call.pool, call.phase, call.what, call.work)
                except WorkerError as error:
                    # Only a death leaves the other replicas as they were, so only then may the caller continue.
                    if not error.process_died:
                        raise
                    found[call] = error
                else:
                    self._add_duration(call.phase, time.monotonic() - call.started)
        return found

    def take_calls(self) -> list[CallSpan]:
        """Calls that have ended since the last time, those of a phase merged if they are many; see CallSpans."""
        with self._lock:
            spans, self._calls = self._calls, CallSpans()
        return spans.taken()

    def together(self, phase: str, *calls: tuple[WorkerGroup, str, Call[Any]]) -> list[list[Any]]:
        """Results of calls on several groups, which may wait for one another, within the time for one.

        calls: (group, what, call).

        Raises what ``call`` does as soon as one group has failed; if that group only lost another one, the error of the
        other.
        """
        limit, started = self.limit(phase), time.monotonic()
        waiting: dict[Future[Any], tuple[str, str]] = {}
        for group, what, call in calls:
            with self._reported(phase, what, list):
                waiting[group.call(call, phase=what, limit=limit)] = what, group.name
        in_order = list(waiting)
        results: dict[Future[Any], list[Any]] = {}
        while waiting:
            # Of all: waiting for one group would delay the error of another.
            for future in wait_any(list(waiting)):
                what, pool = waiting.pop(future)
                try:
                    results[future] = self._result(future, pool, phase, what)
                except (WorkerError, PhaseTimeout) as error:
                    raise self._cause(error, phase, waiting) from None
        # After success only, as in ``call``.
        self._add_duration(phase, time.monotonic() - started)
        return [results[future] for future in in_order]

    def _cause(
        self, error: WorkerError | PhaseTimeout, phase: str, others: Mapping[Future[Any], tuple[str, str]]
    ) -> WorkerError | PhaseTimeout:
        """The error to report after a group failed while others had not answered. others: {future: (what, pool)}.

        The rank that is late may be in one of the others: after a timeout their states are reported too.
        """
        if isinstance(error, PhaseTimeout):
            for future, (what, _) in others.items():
                error.last_words += f"\n{what}: {self._report(phase, what, future.examine(), list)}"
            return error
        deadline = time.monotonic() + CAUSE_SECONDS
        waiting = list(others)
        # The channel was lost because a rank of another group failed: the error of that rank is the one to report.
        while error.kind == LOST and waiting and (remaining := deadline - time.monotonic()) > 0:
            for future in wait_any(waiting, remaining):
                waiting.remove(future)
                what, pool = others[future]
                try:
                    self._result(future, pool, phase, what)
                except (WorkerError, PhaseTimeout) as cause:
                    return cause
        return error

    def _result(self, future: Future[R], pool: str, phase: str, what: str, work: Callable[[], Sequence[str]] = list) -> list[R]:
        """Wait for a call and record it. A timeout gets a report, also that of a collective, which is a WorkerError."""
        try:
            with self._reported(phase, what, work):
                result = future.result()
        except WorkerError as error:
            if ended_in_collective(str(error)):
                raise self._stuck(future, error, phase, what, work) from error
            raise
        with self._lock:
            self._calls.add(what.partition(" (")[0], pool, future.begun, future.replies.ended)
        return result

    @contextmanager
    def _reported(self, phase: str, what: str, work: Callable[[], Sequence[str]]) -> Iterator[None]:
        """Add a report to a PhaseTimeout of a call."""
        limit = self.limit(phase)
        self._waits[what] = f"{limit.seconds:g} s at most, {limit.source}"
        try:
            yield
        except PhaseTimeout as error:
            error.last_words = self._report(phase, what, error.states, work)
            raise
        finally:
            self._waits.pop(what, None)

    @contextmanager
    def own(self, phase: str, what: str, work: str) -> Iterator[None]:
        """Limit work of this process, or of children that it waits for.

        Raises PhaseTimeout wherever the work is when its time is over, or LeftUndone if that is after ``hurry`` and the work
        has taken longer than ever before (see HURRIED). Nothing can be raised while C code does not return: then the process
        ends with its stacks and exit status 1.
        """
        limit, started = self.limit(phase), time.monotonic()

        def report() -> str:
            return "" if self._hurried else self._report(phase, what, controller_state(), lambda: [work])

        patience = min(limit.seconds, max(HURRIED, self._durations.get(phase, (0, 0.0))[1]))
        alarm = _Alarm(patience if self._hurried else limit.seconds, report)
        self._own = (alarm, started + patience, what)
        # USERS: stderr itself may be redirected to a log.
        faulthandler.dump_traceback_later(limit.seconds + EXIT_SECONDS, exit=True, file=USERS[-1])
        try:
            with alarm:
                yield
        except _Expired:
            if self._hurried:
                raise LeftUndone(what) from None
            raise PhaseTimeout(limit.of(what), [], limit.seconds, alarm.report) from None
        finally:
            faulthandler.cancel_dump_traceback_later()
            self._own = None
        self._add_duration(phase, time.monotonic() - started)

    def hurry(self) -> str:
        """From now on abandon work of this process that takes long, see ``own``. May be called by a signal handler.

        Returns what this process waits for and for how long at most, "" for nothing.
        """
        self._hurried = True
        if self._own is not None:
            alarm, due, what = self._own
            left = max(HURRIED, due - time.monotonic())
            alarm.ring_in(left)
            return f"{what}, {left:.0f} s at most: then the step is dropped"
        return ", ".join(f"{what} ({limit})" for what, limit in list(self._waits.items()))

    def _add_duration(self, phase: str, seconds: float) -> None:
        """Record the duration of a phase."""
        with self._lock:
            count, longest = self._durations.get(phase, (0, 0.0))
            self._durations[phase] = count + 1, max(longest, seconds)

    def _stuck(
        self, future: Future[Any], error: WorkerError, phase: str, what: str, work: Callable[[], Sequence[str]]
    ) -> PhaseTimeout:
        """PhaseTimeout after a rank gave up waiting in a collective: the others are late, not that rank."""
        states = future.examine()
        late = verdict(states, [error.rank]).ranks
        words = self._report(phase, what, states, work, [error.rank])
        limit = Limit(self._limits["collective"], f"timeouts.collective={self._limits['collective']:g}")
        return PhaseTimeout(limit.of(f"a collective in {what}"), late, limit.seconds, words)

    def _report(
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
            self.events.add(self.step, "stall", f"{what} took too long{blamed}: see {directory}")
        except OSError as error:  # the disk may be the cause
            directory = f"not kept: {error}"
        return summary(stall, self._run_dir, directory)


class _Expired(BaseException):
    """Raised in the main thread. Not an Exception, so that `except Exception` of a user's function does not catch it."""


@dataclass(frozen=True, slots=True, eq=False)
class StartedCall(Generic[R]):
    """A call under way on one replica. started: time.monotonic(). The others: see Watchdog.call."""

    future: Future[R]
    pool: str
    phase: str
    what: str
    work: Callable[[], Sequence[str]]
    replica: int
    started: float


class _Alarm:
    """Within the block, raise _Expired in the main thread after ``seconds``, wherever it is. ``report`` is called first."""

    def __init__(self, seconds: float, report: Callable[[], str]) -> None:
        self.report = ""
        """What it returned."""
        self._make_report = report
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
            self.report = self._make_report()
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
