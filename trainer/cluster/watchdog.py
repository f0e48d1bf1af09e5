"""How long a phase may take, and what becomes of one that takes longer. Every call on workers goes through here."""

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
from workers.controller.stacks import answer_for_stacks

MEASURED = 3  # so often a phase must have been seen
WIDENED = 10.0  # times its longest, it may then take
MOST_CALLS = 1000
LOOK = 0.005  # seconds between looks at calls of several groups
NEWS_SECONDS = 3.0  # until a group's own error is known, when another has lost it
LOST = "ChannelLost"  # workers/rollout/sync/channel.py: somebody else's error says why
HURRIED = 5.0  # seconds that scoring may still take after a signal to stop, or as long as it has ever taken if that is more
LAST_RESORT = 60.0  # seconds after the limit: the process ends, if nothing else can be done with it
_EXPIRED = signal.SIGRTMIN + 6


@dataclass(frozen=True, slots=True)
class Call:
    """When the workers of a pool did ``what``: from ``start``, in seconds since 1970, to the end of each rank."""

    what: str
    pool: str
    start: float
    ends: tuple[float, ...]


class LeftUndone(Exception):
    """Work of this process that was left, since the run is to stop: see Watchdog.hurry."""


class Watchdog:
    def __init__(self, limits: Mapping[str, float], run_dir: Path) -> None:
        """limits: the group ``timeouts``, seconds by phase. For the main thread, but for ``call``."""
        answer_for_stacks()
        self.step = 0
        """That the run is in, for what is told."""
        self._calls: deque[Call] = deque(maxlen=MOST_CALLS)
        self._limits = limits
        self._run_dir = run_dir
        self._events = Events(run_dir)
        self._seen: dict[str, tuple[int, float]] = {}
        self._lock = threading.Lock()
        """Calls come from several threads where pools work at the same time."""
        self._hurried = False
        self._own: tuple[_Alarm, float] | None = None
        """Of the work that is under way; and when, by time.monotonic(), it has taken longer than ever before."""

    def limit(self, phase: str) -> float:
        """Seconds: what is configured, or 10 x the longest of three and more, so that a slow machine is not taken for a hang."""
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
        """The result of ``group.call(method, *args)``. what: the phase in the user's words. work: by rank, what it works on.

        Raises WorkerError, and PhaseTimeout when the phase, or a collective in it, has taken too long; both with ``what``.
        """
        limit, started = self.limit(phase), time.monotonic()
        result = self._result(lambda: group.call(method, *args, mesh=mesh, timeout=limit), phase, what, work, group.name)
        self._saw(phase, time.monotonic() - started)
        return result

    def take_calls(self) -> list[Call]:
        """When which rank was at what: what has ended since the last time, the last MOST_CALLS of it."""
        taken = list(self._calls)
        self._calls.clear()
        return taken

    def together(self, phase: str, *calls: tuple[WorkerGroup, str, tuple[Any, ...]]) -> list[list[Any]]:
        """The results of calls on groups that wait for one another, in the time for one. calls: (group, what, what is called).

        Raises what ``call`` does as soon as one group has failed; where that one only lost another, the other's error.
        """
        limit, started = self.limit(phase), time.monotonic()
        pools = {what: group.name for group, what, _ in calls}
        waiting = [(what, group.call(*words, timeout=limit)) for group, what, words in calls]
        results: dict[str, list[Any]] = {}
        while waiting:
            over = time.monotonic() > started + limit
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
        """Of a group's error, while others had not answered. Who was late may be among those: they are told of too."""
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
        """Work of this process, or of children that it waits for. Raises PhaseTimeout wherever it is when its time is over, and
        LeftUndone if that is after ``hurry``, and it has taken longer than ever before (see HURRIED).

        While C code does not come back nothing can be raised: then the process ends with its stacks and exit status 1.
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
        """For a signal's handler: from now on work of this process that takes long is left, see ``own``."""
        self._hurried = True
        if self._own is not None:
            alarm, due = self._own
            alarm.ring_in(max(HURRIED, due - time.monotonic()))

    def _saw(self, phase: str, seconds: float) -> None:
        with self._lock:
            count, longest = self._seen.get(phase, (0, 0.0))
            self._seen[phase] = count + 1, max(longest, seconds)

    def _limited(self, what: str, phase: str) -> str:
        widened = ", widened by what was measured" if self.limit(phase) > self._limits[phase] else ""
        return f"{what}, limited by timeouts.{phase}={self._limits[phase]:g}{widened},"

    def _stuck(
        self, future: Future, error: WorkerError, phase: str, what: str, work: Callable[[], Sequence[str]]
    ) -> PhaseTimeout:
        """A rank gave up waiting for the others in a collective: they are what is late, not that rank."""
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
        """Keep all that is known, and the event; the summary."""
        stall = Stall(self.step, phase, states, work(), verdict(states, waited))
        try:
            with self._lock:
                directory = str(record(stall, self._run_dir))
            blamed = f", held up by ranks {stall.verdict.ranks}" if stall.verdict.why else ""
            self._events.add(self.step, "stall", f"{what} took too long{blamed}: see {directory}")
        except OSError as error:  # the disk may be what is ill
            directory = f"not kept: {error}"
        return summary(stall, self._run_dir, directory)


class _Expired(BaseException):
    """Raised in the main thread; no `except Exception` of a user's function takes it for its own."""


class _Alarm:
    """Within, for the main thread: after so many seconds _Expired is raised wherever it is. told: what ``tell`` said before."""

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
        """A second timer: a handler must not wait for the lock of the first one, which it may have interrupted."""
        timer = threading.Timer(seconds, self._ring)
        timer.daemon = True
        timer.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._timer.cancel()
        with self._lock:
            self._armed = False

    def _ring(self) -> None:
        try:
            self.told = self._tell()
        finally:
            with self._lock:
                if self._armed:
                    signal.pthread_kill(threading.main_thread().ident or 0, _EXPIRED)

    def _expire(self, number: int, frame: FrameType | None) -> None:
        """The handler stays when the block is over: without one a late signal would end the process."""
        if self._armed:
            raise _Expired


def controller_state() -> list[RankState]:
    """Of this process, and of all that it started."""
    return [RankState(CONTROLLER, False, examine([os.getpid()])[0], None, ())]
