"""User code in threads of its session: what blocks, raises or exits holds up nothing else."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any

import pytest

from trainer.agents.isolation import SessionLoop, UserCodeError, in_thread, to_the_end

NAME = ContextVar("NAME", default="")


def run(body: Callable[[SessionLoop], Coroutine[Any, Any, Any]]) -> Any:
    async def main() -> Any:
        loop = SessionLoop()
        try:
            return await body(loop)
        finally:
            loop.close()

    return asyncio.run(main())


async def answer(x: int, *, y: int = 0) -> int:
    await asyncio.sleep(0)
    return x + y


def test_results_come_back_from_functions_and_coroutines() -> None:
    async def body(loop: SessionLoop) -> list[Any]:
        NAME.set("session")
        return [
            await loop.run(answer, 1, seconds=60, y=2),
            await loop.run(lambda: (NAME.get(), threading.current_thread() is threading.main_thread()), seconds=60),
        ]

    assert run(body) == [3, ("session", False)]


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    "error", [ValueError("a\nb"), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), Unprintable()]
)
@pytest.mark.parametrize("is_async", [True, False])
def test_whatever_is_raised_is_an_error_in_one_line_and_the_session_continues(error: BaseException, is_async: bool) -> None:
    def fails() -> None:
        raise error

    async def fails_later() -> None:
        await asyncio.sleep(0)
        raise error

    async def body(loop: SessionLoop) -> None:
        with pytest.raises(UserCodeError, match=f"^{type(error).__name__}[^\n]*$") as caught:
            await loop.run(fails_later if is_async else fails, seconds=60)
        assert not caught.value.late and loop.hung == 0
        assert await loop.run(answer, 1, seconds=60) == 1

    run(body)


@pytest.mark.parametrize("is_async", [True, False])
def test_code_that_blocks_its_thread_is_left_behind_and_neither_session_waits_for_it(is_async: bool) -> None:
    release, entered = threading.Event(), threading.Event()

    def blocks() -> None:
        entered.set()
        release.wait(60)

    async def blocks_the_loop() -> None:
        blocks()

    async def body(loop: SessionLoop) -> None:
        other = SessionLoop()
        hanging = asyncio.create_task(loop.run(blocks_the_loop if is_async else blocks, seconds=1.0))
        while not entered.is_set():
            await asyncio.sleep(0.001)
        # While it hangs: the other session, and functions of the same one.
        assert await other.run(answer, 5, seconds=60) == 5
        assert await loop.run(lambda: 6, seconds=60) == 6
        with pytest.raises(UserCodeError, match=r"^it took more than 1 s$") as caught:
            await hanging
        assert caught.value.late and loop.hung == 1 and not release.is_set()
        assert await loop.run(answer, 7, seconds=60) == 7
        other.close()

    try:
        run(body)
    finally:
        release.set()


def test_a_coroutine_over_its_limit_is_cancelled_and_its_loop_is_kept() -> None:
    cancelled = threading.Event()

    async def waits() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()

    async def thread() -> threading.Thread:
        return threading.current_thread()

    async def body(loop: SessionLoop) -> None:
        before = await loop.run(thread, seconds=60)
        with pytest.raises(UserCodeError):
            await loop.run(waits, seconds=0.01)
        assert await loop.run(thread, seconds=60) is before
        assert cancelled.wait(60) and loop.hung == 0

    run(body)


def test_a_session_ends_with_its_thread_and_its_coroutines() -> None:
    async def body(loop: SessionLoop) -> threading.Thread:
        async def leaves_a_task() -> threading.Thread:
            tasks.append(asyncio.create_task(asyncio.sleep(3600)))
            return threading.current_thread()

        return await loop.run(leaves_a_task, seconds=60)

    tasks: list[asyncio.Task[None]] = []
    thread = run(body)
    thread.join(60)
    assert not thread.is_alive() and tasks[0].cancelled()


def test_a_waiting_program_that_is_cancelled_cancels_the_coroutine() -> None:
    entered, cancelled = threading.Event(), threading.Event()

    async def waits() -> None:
        try:
            entered.set()
            await asyncio.sleep(3600)
        finally:
            cancelled.set()

    async def body(loop: SessionLoop) -> None:
        task = asyncio.create_task(loop.run(waits, seconds=3600))
        while not entered.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(cancelled.wait, 60)

    run(body)


def test_a_row_may_have_any_names_and_what_its_values_do_to_a_call_is_an_error() -> None:
    async def takes(**kwargs: Any) -> dict[str, Any]:
        return kwargs

    async def body(loop: SessionLoop) -> None:
        assert await loop.run(takes, seconds=60, function=1, self=2) == {"function": 1, "self": 2}
        with pytest.raises(UserCodeError, match=r"^TypeError: [^\n]*answer"):
            await loop.run(answer, 1, seconds=60, x=2)

    run(body)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("stops", [True, False])
def test_a_loop_that_user_code_ends_is_replaced(stops: bool) -> None:
    async def ends_soon() -> threading.Thread:
        async def background() -> None:
            if stops:
                asyncio.get_running_loop().stop()
            else:
                raise SystemExit

        tasks.append(asyncio.create_task(background()))
        return threading.current_thread()

    tasks: list[asyncio.Task[None]] = []

    async def body(loop: SessionLoop) -> None:
        thread = await loop.run(ends_soon, seconds=60)
        await asyncio.to_thread(thread.join, 60)
        assert not thread.is_alive()
        assert await loop.run(answer, 3, seconds=60) == 3
        thread = await loop.run(ends_soon, seconds=60)
        await asyncio.to_thread(thread.join, 60)
        loop.close()
        assert await loop.run(answer, 4, seconds=60) == 4 and loop.hung == 0

    run(body)


def test_a_loop_that_ends_while_it_is_called_is_an_error_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(work: Any, loop: Any) -> Any:
        raise RuntimeError("Event loop is closed")

    async def body(loop: SessionLoop) -> None:
        await loop.run(answer, 1, seconds=60)
        with monkeypatch.context() as patch, pytest.raises(UserCodeError, match="Event loop is closed"):
            patch.setattr(asyncio, "run_coroutine_threadsafe", closed)
            await loop.run(answer, 1, seconds=60)

    run(body)


def test_a_thread_that_cannot_be_started_leaves_a_session_that_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Any) -> None:
        raise RuntimeError("can't start new thread")

    async def body(loop: SessionLoop) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fails)
            for function in (answer, len):
                with pytest.raises(UserCodeError, match="no thread could be started"):
                    await loop.run(function, "", seconds=60)
        assert await loop.run(answer, 2, seconds=60) == 2

    run(body)


def test_work_in_a_thread_returns_and_raises_and_is_not_waited_for() -> None:
    async def main() -> None:
        assert await in_thread(lambda x: (x, threading.current_thread().daemon), 3) == (3, True)
        with pytest.raises(KeyError):
            await in_thread({}.__getitem__, "a")
        hangs = asyncio.create_task(in_thread(release.wait, 60))
        await asyncio.sleep(0)
        hangs.cancel()

    release = threading.Event()
    asyncio.run(main())
    assert not release.is_set()
    release.set()


def test_a_task_that_is_cancelled_again_and_again_awaits_its_work_to_the_end() -> None:
    async def main() -> None:
        done, go = [], asyncio.Event()

        async def work() -> None:
            await go.wait()
            done.append(True)

        task = asyncio.create_task(to_the_end(work()))
        for _ in range(3):
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert done == [True]
        await to_the_end(work())

    asyncio.run(main())
