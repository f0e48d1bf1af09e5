"""When a coroutine has settled: its loop does nothing, sends nothing, and its threads have returned or had their time."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.trainer.agents.sessions.scripted import setup, task
from tests.trainer.agents.sessions.test_agent_program import finished, run
from trainer.agents.isolation import LoopState
from trainer.agents.sessions import agent_program
from trainer.agents.sessions.agent_loop import AgentKit
from trainer.agents.sessions.agent_program import ProgramCalls, ProgramRunner
from trainer.agents.sessions.protocol import Journal

LATE = """
import asyncio, time
from openai import AsyncOpenAI


async def run(base_url, api_key, task):
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        async def ask(text, seconds):
            if seconds:
                await asyncio.to_thread(time.sleep, seconds)
            return await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": text}])

        await asyncio.gather(ask("a", 0), ask("b", 0.5))
    return 1.0
"""


class ScriptedCode:
    """User code whose loop has these states, one after the other."""

    def __init__(self, states: list[LoopState | None]) -> None:
        self.left: Iterator[LoopState | None] = iter(states)
        self.n = 0

    async def state(self) -> LoopState | None:
        self.n += 1
        return next(self.left)


def n_looks(*states: LoopState | None) -> int:
    """States that are looked at until the coroutine is quiet. Fails if it is not with the last one."""

    async def main() -> int:
        code: Any = ScriptedCode([*states])
        session: Any = SimpleNamespace(user_code=code, kit=SimpleNamespace(config=SimpleNamespace(tool_timeout=60.0)))
        await ProgramCalls(session, blocks=False)._quiet()
        return int(code.n)

    return asyncio.run(main())


def test_a_loop_is_quiet_when_it_has_done_nothing_since_the_last_look() -> None:
    assert n_looks(LoopState(5, 0, 0), LoopState(5, 0, 0)) == 2
    assert n_looks(LoopState(5, 0, 0), LoopState(6, 0, 0), LoopState(7, 0, 0), LoopState(7, 0, 0)) == 4
    assert n_looks(LoopState(5, 0, 0), None) == 2, "a loop that has ended does nothing more"


def test_a_loop_that_sends_is_not_quiet_however_long_it_takes() -> None:
    sends = [LoopState(5, 1, 0)] * 50
    assert n_looks(*sends, LoopState(5, 0, 0), LoopState(5, 0, 0)) == 52


def test_threads_of_a_loop_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_program, "_PATIENCE", 3600.0)
    assert n_looks(*[LoopState(5, 0, 1)] * 50, LoopState(5, 0, 0), LoopState(5, 0, 0)) == 52


def test_threads_that_do_not_return_are_waited_for_no_longer_than_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_program, "_PATIENCE", 0.0)
    assert n_looks(*[LoopState(5, 0, 1)] * 2) == 2
    # Their time begins anew whenever the loop has done something.
    assert n_looks(LoopState(5, 0, 1), LoopState(6, 0, 1), LoopState(7, 0, 1), LoopState(7, 0, 1)) == 4
    assert n_looks(*[LoopState(5, 1, 1)] * 9, *[LoopState(5, 0, 1)] * 2) == 11, "what is sent is waited for nevertheless"


def test_a_call_after_a_thread_is_in_the_tick_of_the_calls_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_program, "_PATIENCE", 3600.0)
    (tmp_path / "late.py").write_text(LATE)
    settled = list[int]()
    runner = ProgramRunner(f"{tmp_path}/late.py:run")
    found = run(runner, AgentKit(setup(tmp_path)), [Journal(task())], settled=settled)
    assert finished(found[0]).reward == 1.0 and settled == [2]
