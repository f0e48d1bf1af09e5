"""Agent process: runs its sessions in one event loop; messages come and go in batches over a socket.

A batch is a length (8 bytes) and a pickle. The pool sends the AgentSetup, then lists of ("start", number, (Journal, died)),
("turn", number, SampledTurn) and ("stop", number, None). The process sends None (ready) or an error of the setup, then
(threads left behind, [(number, turns given, message)]), where a message is Wanted, Settled, Finished, None (stopped) or an
exception. Numbers belong to a start of a session, so that nothing is taken for an answer of an earlier start.
"""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
import pickle
import socket
import traceback
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from trainer.agents.isolation import SessionLoop, UserCodeError
from trainer.agents.sessions.agent_kit import AgentSetup
from trainer.agents.sessions.agent_loop import AgentLoops
from trainer.agents.sessions.agent_program import ProgramRunner
from trainer.agents.sessions.agent_session import AgentSession, JournalDiffers, SessionRefused
from trainer.agents.sessions.protocol import Finished, Journal, Settled, Wanted
from workers.controller.environment import limit_memory
from workers.controller.stacks import enable_stack_reports
from workers.controller.stop import die_with_parent

HEADER = 8
HEARTBEAT_SECONDS = 0.25
_SLOTS = 1 << 14
_OBJECTS = 10_000
"""New objects after which the garbage collector looks at them; Python's default is 700."""


class Marks:
    """Memory shared with the pool: a heartbeat, and which sessions run user code. The pool reads it after a crash too."""

    SIZE = 8 * _SLOTS

    def __init__(self, fd: int) -> None:
        """fd: of a file of SIZE bytes."""
        self._array = np.frombuffer(mmap.mmap(fd, self.SIZE), dtype=np.int64)
        self._slots: dict[int, int] = {}
        self._free = [*range(1, _SLOTS)]

    @property
    def heartbeat(self) -> int:
        return int(self._array[0])

    def beat(self) -> None:
        self._array[0] += 1

    def mark(self, number: int, runs: bool) -> None:
        """number: not 0."""
        if runs and number not in self._slots and self._free:
            slot = self._slots[number] = self._free.pop()
            self._array[slot] = number
        elif not runs and number in self._slots:
            slot = self._slots.pop(number)
            self._array[slot] = 0
            self._free.append(slot)

    def marked(self) -> set[int]:
        return {*self._array[1:].tolist()} - {0}


class _TrackedLoop(SessionLoop):
    """Marks its session while its user code runs, or a thread of it was left behind. died: runs nothing, for this reason."""

    def __init__(self, marks: Marks, number: int, died: str | None) -> None:
        super().__init__()
        self._marks, self._number, self._died = marks, number, died
        self._running, self._waits = 0, False

    def wait(self, waits: bool) -> None:
        """waits: the session waits for the model."""
        self._waits = waits
        self._mark()

    async def run(self, function: Callable[..., Any], /, *args: Any, seconds: float, **kwargs: Any) -> Any:
        if self._died is not None:
            raise UserCodeError(self._died)
        self._running += 1
        self._mark()
        try:
            return await super().run(function, *args, seconds=seconds, **kwargs)
        finally:
            self._running -= 1
            self._mark()

    def close(self) -> None:
        super().close()
        self._marks.mark(self._number, False)

    def _mark(self) -> None:
        self._marks.mark(self._number, (self._running > 0 and not self._waits) or self.hung > 0)


@dataclass(slots=True)
class _Running:
    """A session that was started; another one if it began anew."""

    session: AgentSession
    loop: _TrackedLoop
    task: asyncio.Task[Finished]


class AgentServer:
    """The sessions of a process, by number. One write per turn of the event loop, with all answers."""

    def __init__(
        self, loops: AgentLoops, marks: Marks, write: Callable[[bytes], None], program: ProgramRunner | None = None
    ) -> None:
        """program: runs all sessions, if there is one."""
        self._loops, self._marks, self._write = loops, marks, write
        self._program = program
        self._running: dict[int, _Running] = {}
        self._tasks: dict[int, asyncio.Task[Finished]] = {}
        """The last start of each session."""
        self._answers: list[tuple[int, int, Any]] = []
        self._hung = 0

    def receive(self, messages: list[tuple[str, int, Any]]) -> None:
        for kind, number, content in messages:
            if kind == "start":
                self._start(number, *content)
            elif number not in self._running:
                if kind == "stop":  # it has ended meanwhile
                    self._answer(number, 0, None)
            elif kind == "turn":
                self._running[number].loop.wait(False)
                self._running[number].session.give(content)
            else:
                self._running[number].task.cancel()

    def _start(self, number: int, journal: Journal, died: str | None) -> None:
        def ask(message: Wanted | Settled) -> None:
            if isinstance(message, Settled):
                loop.wait(True)
            self._answer(number, running.session.given, message)

        async def run(previous: asyncio.Task[Finished] | None) -> Finished:
            # An earlier start that was stopped may still release instances of tools, which have the same names.
            if previous is not None:
                await asyncio.wait({previous})
            agent = self._loops.of(journal.task) if self._program is None else self._program.run
            try:
                return await running.session.run(agent)
            except JournalDiffers:
                anew = Journal(journal.task)
                running.session = AgentSession(anew, self._loops.kit, loop, ask, died, restarted=True)
                return await running.session.run(agent)

        id, loop = journal.task.id, _TrackedLoop(self._marks, number, died)
        session = AgentSession(journal, self._loops.kit, loop, ask, died)
        task = asyncio.create_task(run(self._tasks.get(id)))
        running = self._running[number] = _Running(session, loop, task)
        self._tasks[id] = task
        task.add_done_callback(partial(self._end, number))

    def _end(self, number: int, task: asyncio.Task[Finished]) -> None:
        running = self._running.pop(number)
        if self._tasks[running.session.task.id] is task:
            del self._tasks[running.session.task.id]
        running.loop.close()
        self._hung += running.loop.hung
        answer: Finished | BaseException | None = None
        if not task.cancelled():
            answer = error = task.exception()
            if error is None:
                answer = task.result()
            elif not isinstance(error, SessionRefused):  # an error of this program
                answer = RuntimeError("".join(traceback.format_exception(error)))
        self._answer(number, running.session.given, answer)

    def _answer(self, number: int, given: int, message: Any) -> None:
        if not self._answers:
            asyncio.get_running_loop().call_soon(self._flush)
        self._answers.append((number, given, message))

    def _flush(self) -> None:
        hung = self._hung + sum(running.loop.hung for running in self._running.values())
        self._write(packed((hung, self._answers)))
        self._answers = []


def packed(content: Any) -> bytes:
    """A batch as bytes."""
    data = pickle.dumps(content, 5)
    return len(data).to_bytes(HEADER, "big") + data


def main(fd: int, marks_fd: int, parent: int | None) -> None:
    """Entry point of an agent process; returns at the end of its socket. parent: see die_with_parent, if it is to be called."""
    if parent is not None:
        die_with_parent(parent)
    enable_stack_reports()
    # What a tool prints must not end up in the output of the controller, and what it starts must not hold the socket.
    os.dup2(2, 1)
    os.set_inheritable(fd, False)
    marks = Marks(marks_fd)
    os.close(marks_fd)
    with suppress(EOFError, ConnectionError, asyncio.IncompleteReadError):  # the pool is gone
        asyncio.run(_serve(socket.socket(fileno=fd), marks))
    # Threads of user code that hang, also in the executor of asyncio, must not keep the process alive.
    os._exit(0)


async def _serve(connection: socket.socket, marks: Marks) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)

    async def read() -> Any:
        size = int.from_bytes(await reader.readexactly(HEADER), "big")
        return pickle.loads(await reader.readexactly(size))

    async def beat() -> None:
        while True:
            marks.beat()
            await asyncio.sleep(HEARTBEAT_SECONDS)

    setup: AgentSetup = await read()
    if setup.agent.memory_limit_mb is not None:
        limit_memory(setup.agent.memory_limit_mb << 20)
    try:
        loops = AgentLoops(setup)
        program = None if setup.agent.program is None else ProgramRunner(setup.agent.program)
    except ValueError as error:
        writer.write(packed(str(error)))
        await writer.drain()
        return
    # The collector would go through the imported modules and all sessions every few thousand objects: 40 % of a turn's CPU time.
    gc.collect()
    gc.freeze()
    gc.set_threshold(_OBJECTS)
    async with AsyncExitStack() as stack:
        if program is not None:
            await stack.enter_async_context(program.serving())
        server = AgentServer(loops, marks, writer.write, program)
        heart = asyncio.create_task(beat())
        writer.write(packed(loops.kit.continues))
        while not heart.done():
            server.receive(await read())
