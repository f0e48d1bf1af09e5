"""Threads for user code: what blocks holds up the session that runs it, and nothing else.

An event loop stops while any of its coroutines computes or waits in synchronous code, and tools written for verl commonly do
(``requests.post`` in ``async def execute``). So the code of a session never runs in the loop that serves all sessions: a
synchronous function gets a thread, and coroutines of a session share a loop in a thread of the session's own. Python cannot end a
thread. One that hangs is left behind and counted; the process that runs the sessions is replaced when there are too many.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from selectors import EVENT_WRITE, DefaultSelector, SelectorKey
from typing import Any, NamedTuple, TypeVar, TypeVarTuple, Unpack

from trainer.run.user_code import describe

_Result = TypeVar("_Result")
_Args = TypeVarTuple("_Args")
_PATIENCE = 0.5
"""Seconds in which a loop must take a call that does nothing, after one of its coroutines has exceeded its limit."""


class UserCodeError(Exception):
    """User code failed. The text is one line; late: it exceeded its time limit."""

    def __init__(self, message: str, *, late: bool = False) -> None:
        super().__init__(message)
        self.late = late


class LoopState(NamedTuple):
    """What a loop has done and has yet to do. If two in a row are equal, it waits for the network, or for a time.

    work: counts what it has done. sending: connections that are being opened, or have something to send. threads: of its
    executor.
    """

    work: int
    sending: int
    threads: int


class _CountingSelector(DefaultSelector):
    """Selector of a loop that counts its turns with something to do. Turns that ``SessionLoop.state`` makes do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.work = 0
        self._own: int | None = None
        """The loop's own socket, the first one: other threads wake it there."""

    def register(self, fileobj: Any, events: int, data: Any = None) -> SelectorKey:
        key = super().register(fileobj, events, data)
        self._own = key.fd if self._own is None else self._own
        return key

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        found = super().select(timeout)
        self.work += (timeout is not None and timeout <= 0) or any(key.fd != self._own for key, _ in found)
        return found


class _WatchedLoop(asyncio.SelectorEventLoop):
    """Event loop that knows whether it has something to do."""

    def __init__(self) -> None:
        self._counting, self._threads = _CountingSelector(), 0
        super().__init__(self._counting)

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[_Args]], _Result], *args: *_Args
    ) -> asyncio.Future[_Result]:
        future = super().run_in_executor(executor, func, *args)
        self._threads += 1
        future.add_done_callback(self._ended)
        return future

    def state(self) -> LoopState:
        sending = sum(bool(key.events & EVENT_WRITE) for key in self._counting.get_map().values())
        return LoopState(self._counting.work, sending, self._threads)

    def _ended(self, future: asyncio.Future[Any]) -> None:
        self._threads -= 1


class SessionLoop:
    """Runs functions and coroutines of a session's user code. hung: threads that were left behind."""

    def __init__(self) -> None:
        self.hung = 0
        self._loop: _WatchedLoop | None = None
        self._stop: asyncio.Event | None = None

    async def run(self, function: Callable[..., Any], /, *args: Any, seconds: float, **kwargs: Any) -> Any:
        """Return what a function returns, sync or async. Raises UserCodeError if it raises, or after ``seconds``."""
        call = partial(function, *args, **kwargs)
        is_async = inspect.iscoroutinefunction(function)
        if is_async:
            loop, work = self._started(), _contained(call)
            try:
                future = asyncio.run_coroutine_threadsafe(work, loop)
            except RuntimeError as closed:  # the user's code has ended the loop just now
                work.close()
                raise UserCodeError(f"the thread of the session has ended: {closed}") from closed
        else:
            future = _in_thread(partial(copy_context().run, _contained_sync, call))
        if not await _is_done(future, seconds):
            if not is_async:
                self.hung += 1
            # Another call of the session may have found the same loop blocked, and left it.
            elif not await self._responds(loop) and loop is self._loop:
                self.hung += 1
                self._leave()
            raise UserCodeError(f"it took more than {seconds:g} s", late=True)
        value, error = await asyncio.wrap_future(future)
        if error is not None:
            raise UserCodeError(error)
        return value

    def close(self) -> None:
        """End the thread, when its loop is free; coroutines that have not ended are cancelled."""
        self._leave()

    def _started(self) -> asyncio.AbstractEventLoop:
        # User code can end a loop: SystemExit in a task, loop.stop().
        if self._loop is None or self._loop.is_closed():
            loop, stop = _WatchedLoop(), asyncio.Event()

            def serve() -> None:
                with asyncio.Runner(loop_factory=lambda: loop) as runner:
                    runner.run(stop.wait())

            try:
                _start(serve)
            except UserCodeError:
                loop.close()
                raise
            self._loop, self._stop = loop, stop
        return self._loop

    def _leave(self) -> None:
        if self._loop is not None and self._stop is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._stop.set)
        self._loop = self._stop = None

    async def state(self) -> LoopState | None:
        """State of the loop that the session's coroutines run in, after what it has to do now; None without a loop."""
        loop = self._loop
        if loop is None or loop.is_closed():
            return None

        found = Future[LoopState]()

        def answer() -> None:
            if found.set_running_or_notify_cancel():
                found.set_result(loop.state())

        try:
            # Not a coroutine, whose task would be something that the loop has to do.
            loop.call_soon_threadsafe(answer)
        except RuntimeError:  # the user's code has ended the loop just now
            return None
        return await asyncio.wrap_future(found)

    async def _responds(self, loop: asyncio.AbstractEventLoop) -> bool:
        if loop.is_closed():
            return False
        return await _is_done(asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop), _PATIENCE)


async def in_thread(function: Callable[..., _Result], *args: Any) -> _Result:
    """As ``asyncio.to_thread``, in a daemon thread: neither the end of the session nor that of the process waits for it."""
    return await asyncio.wrap_future(_in_thread(partial(function, *args)))


async def to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Await the work also while the task is cancelled; the cancellation is raised afterwards."""
    task, cancelled = asyncio.ensure_future(work), None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


def completed(value: Any) -> Any:
    """The value; of a coroutine, which an async function behind a sync decorator returns, its result."""
    return asyncio.run(value) if inspect.iscoroutine(value) else value


def _start(work: Callable[[], None]) -> None:
    try:
        # Daemons: a thread that hangs must not keep the process alive.
        threading.Thread(target=work, daemon=True).start()
    except RuntimeError as error:  # the limit of threads
        raise UserCodeError(f"no thread could be started: {error}") from error


def _in_thread(function: Callable[[], _Result]) -> Future[_Result]:
    future = Future[_Result]()

    def work() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = function()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    _start(work)
    return future


async def _is_done(future: Future[Any], seconds: float) -> bool:
    """Whether the future has a result or an exception within ``seconds``; otherwise it is cancelled."""
    done = asyncio.wrap_future(future)
    try:
        await asyncio.wait({done}, timeout=seconds)
        return done.done()
    finally:
        done.cancel()


async def _contained(call: Callable[[], Any]) -> tuple[Any, str | None]:
    try:
        return await call(), None
    except BaseException as error:  # anything: SystemExit would end the thread, CancelledError look like a time limit
        return None, described(error)


def _contained_sync(call: Callable[[], Any]) -> tuple[Any, str | None]:
    try:
        return completed(call()), None
    except BaseException as error:
        return None, described(error)


def described(error: BaseException) -> str:
    """The exception in one line. In the user's thread, because its text is made by the user's code."""
    try:
        return describe(error)
    except (Exception, SystemExit) as failure:  # of __str__
        return f"{type(error).__name__}, whose text fails with {type(failure).__name__}"
