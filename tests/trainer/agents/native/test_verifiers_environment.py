"""Classic environments of verifiers: the package's own loop runs, and the session gives it the turns of the model.

The stand-in has the interfaces of verifiers 0.3.1 that the adapter uses; the test marked soak runs the package itself.
"""

import asyncio
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from trainer.agents.environments import Environment, EnvironmentSession, EnvironmentStep
from trainer.agents.isolation import SessionLoop
from trainer.agents.native.verifiers_environment import VerifiersEnvironment
from trainer.agents.sessions.protocol import Task

TASK = Task(0, [], "verifiers", None, {"index": 1}, None, 64, 64)
ROWS = [{"prompt": [{"role": "user", "content": f"1 + {n}?"}], "answer": str(1 + n), "example_id": n} for n in range(2)]
PROMPT = {"role": "user", "content": "1 + 1?"}
AGAIN = {"role": "user", "content": "No. Again."}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 1}'}}


class AnyMessage(BaseModel):
    model_config = ConfigDict(extra="allow")
    role: str = "assistant"
    content: str | None = None


class Fields(BaseModel):
    model_config = ConfigDict(extra="allow")


class AnyClient:
    __abstractmethods__ = frozenset({"close"})

    def __init__(self, client: Any) -> None:
        self.client = client


class FakeEnv:
    """The loop of MultiTurnEnv: asks again until the answer is right, at most three times."""

    def __init__(self, mode: str = "") -> None:
        self.mode, self.cleaned = mode, 0
        self.rubric = SimpleNamespace(score_rollout=self.score, cleanup=self.cleanup)

    def get_dataset(self) -> list[dict[str, Any]]:
        return ROWS

    async def rollout(self, row: Any, client: Any, model: str, sampling_args: Any) -> Any:
        assert isinstance(client, AnyClient)
        state = {"error": None, "reward": None, "metrics": None, "turns": 0}
        prompt = [AnyMessage(**message) for message in row["prompt"]]
        tools = [SimpleNamespace(name="add", description="Add.", parameters={"type": "object"})]
        while state["turns"] < 3:
            response = await client.get_response(prompt=prompt, model=model, tools=tools, sampling_args={}, state=state)
            state["turns"] += 1
            answer = AnyMessage(**response.message.model_dump())
            if self.mode == "error":
                state["error"] = RuntimeError("the sandbox has ended")
                break
            if answer.content == row["answer"]:
                state["right"] = 1.0
                break
            prompt = [*prompt, answer, AnyMessage(**AGAIN)] if self.mode != "rewrite" else [AnyMessage(**AGAIN)]
        return state

    async def score(self, state: Any) -> None:
        state |= {"reward": state.get("right", 0.0), "metrics": {"turns": state["turns"]}}

    async def cleanup(self, state: Any) -> None:
        self.cleaned += 1


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    clients, types = ModuleType("verifiers.clients"), ModuleType("verifiers.types")
    vars(clients)["Client"] = AnyClient
    vars(types).update(ToolCall=Fields, ResponseMessage=AnyMessage, Response=Fields)
    for name, module in {"verifiers": ModuleType("verifiers"), "verifiers.clients": clients, "verifiers.types": types}.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield


def play(env: Any, *texts: str | dict[str, Any]) -> tuple[Any, list[EnvironmentStep], EnvironmentSession]:
    environment: type[Environment] = type("Own", (VerifiersEnvironment,), {"env": env})

    async def main() -> Any:
        loop = SessionLoop()
        try:
            async with EnvironmentSession(environment, loop, seconds=60.0) as session:
                first = await session.reset(TASK)
                turns = [{"role": "assistant"} | (text if isinstance(text, dict) else {"content": text}) for text in texts]
                return first, [await session.step(message) for message in turns], session
        finally:
            loop.close()

    found: tuple[Any, list[EnvironmentStep], EnvironmentSession] = asyncio.run(main())
    return found


@pytest.mark.usefixtures("stand_in")
def test_the_environment_asks_until_it_is_done() -> None:
    env = FakeEnv()
    first, steps, session = play(env, "3", "2")
    assert first == [PROMPT] and session.tools[0]["function"]["name"] == "add"
    assert steps == [EnvironmentStep([AGAIN], 0.0, False, {}), EnvironmentStep([], 1.0, True, {"metrics": {"turns": 2}})]
    assert session.rewards == [0.0, 1.0] and session.error is None and env.cleaned == 1
    _, steps, session = play(FakeEnv(), "3", {"content": None, "tool_calls": [CALL]}, "4")
    assert [step.done for step in steps] == [False, False, True] and session.rewards == [0.0, 0.0, 0.0]


@pytest.mark.usefixtures("stand_in")
def test_errors_of_the_environment_end_the_session() -> None:
    _, steps, session = play(FakeEnv("error"), "3")
    assert steps[0].done and "RuntimeError: the sandbox has ended" in str(session.error)
    _, steps, session = play(FakeEnv("rewrite"), "3")
    assert steps[0].done and "changed earlier messages" in str(session.error)
    _, steps, session = play(FakeEnv(), *["3"] * 2)  # it waits for a turn, and is closed
    assert not steps[-1].done and session.error is None and not session.counts


@pytest.mark.soak
@pytest.mark.skipif(find_spec("verifiers") is None, reason="verifiers is not installed; its pins conflict: own environment")
def test_the_package_itself_runs() -> None:
    datasets, vf = import_module("datasets"), import_module("verifiers")
    data = datasets.Dataset.from_list(ROWS)

    async def right(completion: Any, answer: str) -> float:
        return float(completion[-1].content == answer)

    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: One.
            b: The other.
        """
        return a + b

    class Repeating(vf.MultiTurnEnv):  # type: ignore[name-defined, misc]
        async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
            if messages[-1].content == state["answer"]:
                state["final_env_response"] = [{"role": "user", "content": "Yes."}]
            return [AGAIN]

    async def has_it(completion: Any, answer: str) -> float:
        return float(any(message.content == answer for message in completion))

    single = vf.SingleTurnEnv(dataset=data, rubric=vf.Rubric(funcs=[right]))
    first, steps, session = play(single, "2")
    assert session.error is None and (first, steps[0].done, session.rewards) == ([PROMPT], True, [1.0])
    tools = vf.ToolEnv(dataset=data, tools=[add], rubric=vf.Rubric(funcs=[right]))
    _, steps, session = play(tools, {"content": None, "tool_calls": [CALL]}, "2")
    assert session.tools[0]["function"]["parameters"]["required"] == ["a", "b"]
    assert steps[0].messages == [{"role": "tool", "tool_call_id": "call_1", "content": "2"}]
    assert session.rewards == [0.0, 1.0] and steps[1].info["metrics"]["total_tool_calls"] == 1.0
    several = Repeating(dataset=data, max_turns=5, rubric=vf.Rubric(funcs=[has_it]))
    _, steps, session = play(several, "3", "2")
    assert steps[0].messages == [AGAIN] and session.rewards == [0.0, 1.0] and steps[1].done
