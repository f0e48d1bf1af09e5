"""Agent processes as the controller sees them: sessions are dealt by id, answers collected, processes that die replaced.

Problem: tools crash the interpreter, exhaust memory or hold its lock, and take thousands of sessions with them. Idea: the pool
keeps a journal of every session, so that a process is replaceable: its sessions are repeated from their journals. Sessions that
ran user code when it died are suspects. Each is repeated alone in a process of its own, and returns when it has answered; one
that ends this process too is ended with what it has. No other session ever is.
"""

from __future__ import annotations

import os
import pickle
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from math import inf
from types import TracebackType
from typing import Any

from trainer.agents.sessions.agent_kit import AgentSetup
from trainer.agents.sessions.process import HEADER, Marks, packed
from trainer.agents.sessions.protocol import Finished, Journal, SampledTurn, Settled, Task, Wanted
from workers.controller.environment import import_path
from workers.controller.stop import kill_group

_START_LIMIT = 120.0
"""Seconds until a process must be ready: the user's modules may import a lot."""
_SLACK = 60.0
"""Seconds beyond the time limits of user code in which a session must answer while its process answers no other either."""
_STALL_LIMIT = 30.0
"""Seconds beyond the time limit of a tool without a heartbeat: code that holds the interpreter's lock cannot be interrupted."""
_CALLS = 8
"""Most time limits of user code that one answer may take: create, start, run or reply, calc_reward, release, finalize."""
_MOST_HUNG = 32
"""Threads left behind after which a process is replaced."""
_LOOK_SECONDS = 1.0
_CHILD = "from trainer.agents.sessions.process import main; main({fd}, {marks}, {parent})"


class AgentPool:
    """Pool of agent processes, a context manager. A session answers its start, and turns, when it has settled or finished.

    deaths: processes that died and were replaced. continues: whether sessions can be continued from journals; known when ready.
    seconds_waited: in ``collect`` and ``ready``. Not thread-safe.
    """

    def __init__(self, setup: AgentSetup) -> None:
        """Start nothing yet."""
        self.deaths = 0
        self.continues = True
        self.seconds_waited = 0.0
        self._setup = packed(setup)
        self._timeout = setup.multi_turn.tool_timeout
        self._size = setup.agent.num_workers
        self._has_program = setup.agent.program is not None
        self._homes: list[_AgentProcess] = []
        self._quarantine: _AgentProcess | None = None
        self._isolated: _Session | None = None
        """The suspect that the quarantine has."""
        self._suspects: deque[_Session] = deque()
        self._sessions: dict[int, _Session] = {}
        self._answers: dict[int, list[Wanted | Finished]] = {}
        """Calls and results that were not collected yet, by session."""
        self._due: set[int] = set()
        """Sessions whose answer was not collected yet."""
        self._numbers = count(1)
        self._selector = selectors.DefaultSelector()
        self._looked = 0.0

    def wait_ready(self) -> None:
        """Wait for all processes. Raises ValueError if files of the user do not load, RuntimeError if a process dies."""
        while not all(process.ready for process in self._homes):
            self._pump(_LOOK_SECONDS)

    def start(self, sessions: Iterable[Task | Journal]) -> None:
        """Start sessions, or repeat and continue those of journals. Ids are unique among live sessions."""
        for given in sessions:
            task = given if isinstance(given, Task) else given.task
            assert task.id not in self._sessions, f"session {task.id} is live"
            journal = Journal(task) if isinstance(given, Task) else given.copy()
            session = self._sessions[task.id] = _Session(journal)
            self._due.add(task.id)
            self._place(session, self._home(session))
        self._flush()

    def reply(self, turns: Mapping[int, Sequence[SampledTurn]]) -> None:
        """Give sessions the turns of their calls. A turn that no call waits for is nothing: its session has begun anew."""
        for id, of_session in turns.items():
            session = self._sessions[id]
            journal = session.journal
            for turn in of_session:
                if (turn.key, turn.ordinal) not in journal.waits or session.finished:
                    continue
                journal.waits.remove((turn.key, turn.ordinal))
                journal.turns.append(turn)
                session.owed = True
                self._due.add(id)
                if session.number and not session.leaves:
                    assert session.process is not None
                    self._send(session, session.process, ("turn", session.number, turn), 0)
            if session.owed and session.died is not None and not session.number:
                self._place(session, self._home(session))
        self._flush()

    def collect(self, wait: Collection[int], others: Collection[int] = ()) -> list[Wanted | Finished]:
        """Wait until these sessions have settled or finished; returns their calls and results, session by session.

        others: sessions whose late calls are returned too: those that they made after they had settled. Never waits for ever, see
        ``_late``. Raises ValueError for a session that cannot be trained on, RuntimeError if a process does not start.
        """
        begun = time.monotonic()
        missing = {*wait}
        while missing := {id for id in missing if self._sessions[id].owed}:
            self._pump(_LOOK_SECONDS)
        self.seconds_waited += time.monotonic() - begun
        late = [id for id in self._answers if id in others and id not in self._due and id not in wait]
        return self._collected([*wait, *late])

    def ready(self, others: Collection[int], seconds: float = 0.0) -> list[Wanted | Finished]:
        """Calls and results of these sessions that have arrived, at least one if there is one within ``seconds``.

        Raises as ``collect`` does.
        """
        begun = time.monotonic()
        while self._pump(0.0):
            pass
        while self._answers.keys().isdisjoint(others) and (left := begun + seconds - time.monotonic()) > 0:
            self._pump(min(left, _LOOK_SECONDS))
        self.seconds_waited += time.monotonic() - begun
        return self._collected([id for id in self._answers if id in others])

    def _collected(self, ids: Iterable[int]) -> list[Wanted | Finished]:
        found = list[Wanted | Finished]()
        for id in ids:
            self._due.discard(id)
            found += self._answers.pop(id, ())
            if self._sessions[id].finished:
                del self._sessions[id]
        return found

    def stop(self, sessions: Iterable[int]) -> None:
        """Cancel sessions; they do not answer any more."""
        for id in sessions:
            self._answers.pop(id, None)
            self._due.discard(id)
            session = self._sessions.pop(id, None)
            if session is None:  # it has finished
                continue
            if session in self._suspects:
                self._suspects.remove(session)
            elif session.number and session.process is not None:
                self._leave(session, session.process)
                if session is not self._isolated:
                    del session.process.sessions[session.number]
        self._flush()

    def journal(self, session: int) -> Journal:
        """The journal of a live session; it is the pool's own, to be read."""
        return self._sessions[session].journal

    def close(self) -> None:
        """Kill the processes and everything they started."""
        for process in self._processes():
            if process.ending is None:
                self._drop(process)
        self._homes, self._quarantine, self._isolated = [], None, None
        self._sessions, self._answers, self._due = {}, {}, set()
        self._suspects.clear()

    def __enter__(self) -> AgentPool:
        self._homes = [self._new_process() for _ in range(self._size)]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _processes(self) -> list[_AgentProcess]:
        return [*self._homes, *([self._quarantine] if self._quarantine is not None else [])]

    def _home(self, session: _Session) -> _AgentProcess:
        return self._homes[session.journal.task.id % self._size]

    def _place(self, session: _Session, process: _AgentProcess) -> None:
        """Start a session in a process, from its journal."""
        session.process, session.number, session.leaves, session.runs = process, 0, False, False
        if process.drains:  # it starts in the next one
            return
        session.number = next(self._numbers)
        process.sessions[session.number] = session
        copy = session.journal.copy()  # turns that follow are sent by themselves
        self._send(session, process, ("start", session.number, (copy, session.died)), len(copy.outcomes))

    def _send(self, session: _Session, process: _AgentProcess, message: tuple[str, int, Any], repeated: int) -> None:
        """repeated: outcomes of user code that the session may repeat before it answers."""
        if process.drains:  # the turn is in the journal, from which the next process starts
            return
        session.runs = True
        session.deadline = time.monotonic() + self._limit(repeated)
        process.outbox.append(message)

    def _limit(self, repeated: int) -> float:
        return _SLACK + (_CALLS + repeated) * (self._timeout + 1.0)

    def _flush(self) -> None:
        """Send what is waiting to processes that read."""
        self._pump(0.0)
        while any(process.unsent for process in self._processes() if process.ready):
            self._pump(_LOOK_SECONDS)

    def _pump(self, seconds: float) -> bool:
        """Send, receive, and replace processes; returns whether there was anything to read or write."""
        process: _AgentProcess
        for process in self._processes():
            self._watch(process)
        found = self._selector.select(seconds)
        for key, events in found:
            process = key.data
            if events & selectors.EVENT_WRITE:
                process.write()
            elif key.fileobj is not process.connection:
                process.ended = True
        for key, events in found:
            process = key.data
            if key.fileobj is process.connection and events & selectors.EVENT_READ:
                self._read(process)
        for process in self._processes():
            if process.ended:
                while self._read(process):  # answers before its end
                    pass
                self._replace(process)
            elif process.hung > _MOST_HUNG and process is not self._quarantine:
                self._renew(process)
        self._look()
        self._isolate_next()
        for process in self._processes():
            self._watch(process)
        return bool(found)

    def _watch(self, process: _AgentProcess) -> None:
        writes = process.pack()
        if writes != process.writes and not process.closed:
            process.writes = writes
            events = selectors.EVENT_READ | selectors.EVENT_WRITE if writes else selectors.EVENT_READ
            self._selector.modify(process.connection, events, process)

    def _read(self, process: _AgentProcess) -> bool:
        """Take the answers that have arrived; returns whether there may be more."""
        if process.closed:
            return False
        data = process.receive()
        if process.closed:
            self._selector.unregister(process.connection)
        if not data:
            return False
        for content in process.batches(data):
            if not process.ready:
                if isinstance(content, str):
                    raise ValueError(content)
                self.continues = content
                process.ready, process.answered = True, time.monotonic()
                continue
            process.hung, answers = content
            process.answered = time.monotonic()
            for number, given, message in answers:
                if (session := process.sessions.get(number)) is not None:
                    self._take(process, session, given, message)
        return True

    def _take(self, process: _AgentProcess, session: _Session, given: int, message: Any) -> None:
        """given: turns that the session had when it sent the message."""
        if isinstance(message, BaseException):
            raise message
        if session.leaves:
            if not isinstance(message, Wanted | Settled):  # it is out
                del process.sessions[session.number]
                self._return(session)
            return
        if isinstance(message, Wanted | Finished) and message.restarted:
            session.journal, session.asked = Journal(session.journal.task), set()
        journal = session.journal
        if isinstance(message, Wanted):
            call = message.key, message.ordinal
            if call in session.asked:  # it repeats a call of before the process was replaced
                return
            session.asked.add(call)
            if call not in journal.waits:
                journal.waits.append(call)
        elif isinstance(message, Settled) and given != len(journal.turns):  # it gets another turn
            return
        else:
            session.runs = session.owed = False
        if not isinstance(message, Settled):
            journal.outcomes += message.outcomes
            self._answers.setdefault(journal.task.id, []).append(message)
        if isinstance(message, Finished):
            del process.sessions[session.number]
            session.process, session.number, session.finished = None, 0, True
            if session is self._isolated:
                self._isolated = None
        elif isinstance(message, Settled) and session is self._isolated:
            self._leave(session, process)

    def _leave(self, session: _Session, process: _AgentProcess) -> None:
        session.leaves = True
        session.deadline = time.monotonic() + self._limit(0)
        if not process.drains:
            process.outbox.append(("stop", session.number, None))

    def _return(self, session: _Session) -> None:
        """Take a session from the quarantine home, if it is live."""
        self._isolated = None
        session.process, session.number, session.runs = None, 0, False
        # One that is to be ended waits until it owes an answer.
        if self._sessions.get(session.journal.task.id) is session and (session.owed or session.died is None):
            self._place(session, self._home(session))

    def _isolate_next(self) -> None:
        if self._isolated is None and self._suspects:
            if self._quarantine is None:
                self._quarantine = self._new_process()
            self._isolated = self._suspects.popleft()
            self._place(self._isolated, self._quarantine)

    def _look(self) -> None:
        """Replace processes that hang, now and then."""
        now = time.monotonic()
        if now < self._looked + _LOOK_SECONDS:
            return
        self._looked = now
        for process in self._processes():
            if not process.ready:
                if now > process.started + _START_LIMIT:
                    raise RuntimeError(f"an agent process was not ready in {_START_LIMIT:g} s; see the log for its last output")
                continue
            if process.seconds_without_heartbeat(now) > self._timeout + _STALL_LIMIT:
                self._replace(process, f"its agent process gave no sign of life for {self._timeout + _STALL_LIMIT:g} s")
            elif late := self._late(process, now):
                names = ", ".join(str(session.journal.task.id) for session in late[:8])
                for session in late:
                    if session.died is not None:
                        raise RuntimeError(f"agent process {process.pid} ends sessions {names} without an answer")
                self._replace(process, f"sessions {names} of agent process {process.pid} did not answer", late)

    def _late(self, process: _AgentProcess, now: float) -> list[_Session]:
        """Sessions over their time, if the process answers no other either: it may have much to repeat."""
        if now < process.answered + self._limit(0):
            return []
        return [session for session in process.sessions.values() if (session.runs or session.leaves) and now > session.deadline]

    def _renew(self, process: _AgentProcess) -> None:
        """Replace a process with too many threads left behind, once nothing runs in it."""
        process.drains = True
        if not any(session.runs for session in process.sessions.values()) and not process.unsent:
            inside = self._inside(process)
            self._drop(process)
            self._homes[self._homes.index(process)] = new = self._new_process()
            for session in inside:
                self._place(session, new)

    def _replace(self, process: _AgentProcess, reason: str | None = None, suspects: Collection[_Session] = ()) -> None:
        """Replace a process that died, or that is killed for a reason; find the session that is the cause."""
        marked, inside = process.marks.marked(), self._inside(process)
        ending = self._drop(process)
        if not process.ready:
            raise RuntimeError(f"an agent process did not start: it {ending}; see the log for its last output")
        self.deaths += 1
        reason = reason or f"its agent process {ending}"
        if process is self._quarantine:
            self._quarantine = None
            if (session := self._isolated) is not None:
                if session.died is not None:
                    raise RuntimeError(f"session {session.journal.task.id} cannot be ended: {reason}")
                # One that has answered ended it on leaving: its answer counts.
                session.died = None if session.leaves else reason
                self._return(session)
            return
        suspects = (
            suspects
            or [session for session in inside if session.number in marked]
            or [session for session in inside if session.runs]
            or (inside if self._has_program else [])  # a program may run while it waits for another call
        )
        self._homes[self._homes.index(process)] = new = self._new_process()
        for session in inside:
            if not self.continues and session.journal.outcomes:
                # It ends with what it has, when it owes an answer.
                session.process, session.number, session.runs, session.died = None, 0, False, reason
                if session.owed:
                    self._place(session, new)
            elif session in suspects:
                session.process, session.number, session.runs = None, 0, False
                self._suspects.append(session)
            else:
                self._place(session, new)

    def _inside(self, process: _AgentProcess) -> list[_Session]:
        return [session for session in self._sessions.values() if session.process is process]

    def _new_process(self) -> _AgentProcess:
        process = _AgentProcess(self._setup)
        self._selector.register(process.connection, selectors.EVENT_READ, process)
        self._selector.register(process.end, selectors.EVENT_READ, process)
        return process

    def _drop(self, process: _AgentProcess) -> str:
        if not process.closed:
            self._selector.unregister(process.connection)
        self._selector.unregister(process.end)
        process.ending = process.kill()
        return process.ending


@dataclass(slots=True, eq=False)
class _Session:
    """A live session. owed: the controller waits for its answer. process, number: where it is, and as what; 0: not started.

    runs: the process has a message of it without an answer; until deadline. leaves: it was asked to stop. died: why it is ended.
    asked: calls that were collected, or will be. finished: it has, and its result was not collected yet.
    """

    journal: Journal
    owed: bool = True
    process: _AgentProcess | None = None
    number: int = 0
    runs: bool = False
    deadline: float = inf
    leaves: bool = False
    died: str | None = None
    asked: set[tuple[int, int]] = field(default_factory=set)
    finished: bool = False


class _AgentProcess:
    """One process. end: readable when it has ended. drains: it gets no messages any more, because it is replaced soon."""

    def __init__(self, setup: bytes) -> None:
        self.connection, child_end = socket.socketpair()
        marks = os.memfd_create("agent-marks")
        os.ftruncate(marks, Marks.SIZE)
        self.marks = Marks(marks)
        # The kernel would end it with the thread that starts it: of other threads than the main one it ends with its socket.
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else None
        command = _CHILD.format(fd=child_end.fileno(), marks=marks, parent=parent)
        self._popen = subprocess.Popen(
            # -P: no file of the working directory is imported in place of a module.
            [sys.executable, "-P", "-c", command],
            stdin=subprocess.DEVNULL,
            pass_fds=[child_end.fileno(), marks],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(import_path()), "TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,  # kill() reaches everything that tools started
        )
        child_end.close()
        os.close(marks)
        self.connection.setblocking(False)
        # Not the end of the socket: what a tool forked may have it too.
        self.end = os.pidfd_open(self._popen.pid)
        self.started = self.answered = self._beaten = time.monotonic()
        self._heartbeat = 0
        self.ready = self.ended = self.closed = self.drains = self.writes = False
        self.hung = 0
        self.ending: str | None = None
        self.sessions: dict[int, _Session] = {}
        self.outbox: list[tuple[str, int, Any]] = []
        self._unsent, self._received = bytearray(setup), bytearray()

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def unsent(self) -> bool:
        return bool(self._unsent or self.outbox) and not self.closed

    def pack(self) -> bool:
        """Make a batch of the messages; returns whether there is anything to write."""
        if self.outbox:
            self._unsent += packed(self.outbox)
            self.outbox = []
        return bool(self._unsent) and not self.closed

    def write(self) -> None:
        with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):  # its end is reported by itself
            sent = self.connection.send(memoryview(self._unsent)[: 1 << 20])
            del self._unsent[:sent]

    def receive(self) -> bytes:
        """Bytes that have arrived; none: no more for now, or ever."""
        try:
            data = self.connection.recv(1 << 20)
        except BlockingIOError:
            return b""
        except ConnectionResetError:  # it died with unread messages
            data = b""
        self.closed = not data
        return data

    def batches(self, data: bytes) -> Iterable[Any]:
        """Batches that are complete with these bytes."""
        self._received += data
        at = 0
        while len(self._received) >= at + HEADER:
            end = at + HEADER + int.from_bytes(self._received[at : at + HEADER], "big")
            if len(self._received) < end:
                break
            yield pickle.loads(memoryview(self._received)[at + HEADER : end])
            at = end
        del self._received[:at]

    def seconds_without_heartbeat(self, now: float) -> float:
        if self.marks.heartbeat != self._heartbeat:
            self._heartbeat, self._beaten = self.marks.heartbeat, now
        return now - self._beaten

    def kill(self) -> str:
        """Kill the process and everything it started; return how it ended."""
        self.connection.close()
        ending = kill_group(self._popen)
        os.close(self.end)
        return ending
