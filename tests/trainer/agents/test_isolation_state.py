"""State of the loop of a session's coroutines: what it has done, what it has to send, and its threads."""

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from trainer.agents.isolation import LoopState, SessionLoop


def run(body: Callable[[SessionLoop], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        loop = SessionLoop()
        try:
            await body(loop)
        finally:
            loop.close()

    asyncio.run(main())


async def state_of(loop: SessionLoop) -> LoopState:
    """State of a loop whose coroutines wait."""
    seen = None
    for _ in range(1000):
        state = await loop.state()
        if state is not None and state == seen:
            return state
        seen = state
    raise AssertionError(f"the loop is never quiet: {seen}")


def test_a_session_without_coroutines_has_no_state() -> None:
    async def body(loop: SessionLoop) -> None:
        await loop.run(len, "ab", seconds=60)
        assert await loop.state() is None

    run(body)


def test_work_counts_what_coroutines_do_and_is_the_same_while_they_wait() -> None:
    async def body(loop: SessionLoop) -> None:
        async def turns(n: int) -> None:
            for _ in range(n):
                await asyncio.sleep(0)

        await loop.run(turns, 1, seconds=60)
        before = await state_of(loop)
        assert (await state_of(loop)).work < before.work + 10
        await loop.run(turns, 100, seconds=60)
        after = await state_of(loop)
        assert after.work >= before.work + 100 and after[1:] == (0, 0)

    run(body)


def test_a_connection_with_something_to_send_is_counted_until_all_is_sent() -> None:
    def read_all() -> int:
        n = 0
        while part := far.recv(1 << 20):
            n += len(part)
        return n

    async def body(loop: SessionLoop) -> None:
        async def begins() -> asyncio.Task[None]:
            sending = asyncio.ensure_future(asyncio.get_running_loop().sock_sendall(near, data))
            for _ in range(3):
                await asyncio.sleep(0)
            return sending

        async def ends(sending: asyncio.Task[None]) -> None:
            await sending
            near.close()

        sending = await loop.run(begins, seconds=60)
        assert (await state_of(loop)).sending == 1
        reading = asyncio.create_task(asyncio.to_thread(read_all))
        await loop.run(ends, sending, seconds=60)
        assert (await state_of(loop)).sending == 0 and await reading == len(data)

    data = b"x" * (8 << 20)  # more than the kernel holds
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        run(body)


def test_threads_of_the_executor_are_counted_until_they_return() -> None:
    async def body(loop: SessionLoop) -> None:
        async def begins() -> list[asyncio.Future[bool]]:
            own = asyncio.get_running_loop()
            return [own.run_in_executor(None, release.wait, 60) for release in releases]

        async def ends(future: asyncio.Future[bool]) -> bool:
            return await future

        futures = await loop.run(begins, seconds=60)
        assert (await state_of(loop)).threads == 2
        for n, (release, future) in enumerate(zip(releases, futures, strict=True)):
            release.set()
            assert await loop.run(ends, future, seconds=60)
            assert (await state_of(loop)).threads == 1 - n

    releases = [threading.Event(), threading.Event()]
    run(body)
