"""Tool boxes: every call gets a result, every instance is released, and no tool holds up another session."""

import asyncio
import functools
import json
import pickle
import threading
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.agents.formats import MalformedCall, ToolCall
from trainer.agents.isolation import SessionLoop
from trainer.agents.toolbox import SessionData, Side, ToolBox, ToolLimits, ToolResult, truncated
from trainer.agents.tools import AnyTool, BaseTool, OpenAIFunctionToolSchema, StatefulTool, ToolResponse, tool

LIMITS = ToolLimits(max_parallel_calls=8, max_tool_response_length=256, tool_response_truncate_side="middle", seconds=60.0)


@tool
def add(a: int, b: int = 1) -> int:
    """Add.

    Args:
        a: A number.
        b: Another.
    """
    return a + b


@tool
async def later(text: str) -> tuple[str, float, dict[str, float]]:
    """Echo.

    Args:
        text: The text.
    """
    await asyncio.sleep(0)
    return text, 0.5, {"length": len(text)}


@tool
def fails(how: str) -> str:
    """Fail.

    Args:
        how: In which way.
    """
    if how == "exit":
        raise SystemExit(1)
    if how == "flood":
        return "x" * 10**8
    if how == "surrogate":
        return "\ud800"
    raise RuntimeError("no\nnetwork")


def schema(name: str) -> OpenAIFunctionToolSchema:
    parameters = {"type": "object", "properties": {"by": {"type": "integer", "minimum": 0}}, "required": ["by"]}
    function = {"name": name, "description": "Count.", "parameters": parameters}
    return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})


class Counting(BaseTool):
    """Counts per session; a log of all calls. failing: the method that raises."""

    def __init__(self, name: str, failing: str = "") -> None:
        super().__init__({}, schema(name))
        self.failing = failing
        self.state: dict[str, int] = {}
        self.log: list[tuple[Any, ...]] = []

    def note(self, method: str, *entry: Any) -> None:
        self.log.append((method, *entry))
        if method == self.failing:
            raise RuntimeError(f"{method} fails")

    async def create(self, instance_id: str | None = None, start: int = 0, **kwargs: Any) -> tuple[str, ToolResponse]:
        self.note("create", instance_id, start, kwargs)
        name = f"{self.name}-{instance_id}"
        self.state[name] = start
        return name, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        self.note("execute", instance_id, parameters, kwargs["agent_data"].messages)
        self.state[instance_id] += parameters["by"]
        return ToolResponse(text=str(self.state[instance_id])), 0.25, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        self.note("calc_reward", instance_id, kwargs)
        return float(self.state[instance_id])

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.note("release", instance_id)
        del self.state[instance_id]


def session(
    tools: Sequence[AnyTool],
    body: Callable[[ToolBox], Awaitable[Any]],
    limits: ToolLimits = LIMITS,
    kwargs: Any = None,
    name: str = "s1",
) -> tuple[ToolBox, Any]:
    """A tool box after its end, and what the body returned."""

    async def main() -> tuple[ToolBox, Any]:
        loop = SessionLoop()
        try:
            async with ToolBox(tools, limits, session=name, loop=loop, kwargs=kwargs) as box:
                result = await body(box)
            return box, result
        finally:
            loop.close()

    return asyncio.run(main())


def results(tools: Sequence[AnyTool], *calls: ToolCall | MalformedCall, limits: ToolLimits = LIMITS) -> list[ToolResult]:
    return session(tools, lambda box: box.run(calls), limits)[1]


def call(name: str, number: int = 0, **arguments: Any) -> ToolCall:
    return ToolCall(f"call_0_{number}", name, arguments)


def test_results_have_the_order_ids_and_values_of_their_calls() -> None:
    calls = [call("later", 0, text="hi"), call("add", 1, a=1), call("add", 2, a=1, b=5)]
    found = results([add, later], *calls)
    assert found == [
        ToolResult("call_0_0", "later", "ok", "hi", 0.5, {"length": 2.0}),
        ToolResult("call_0_1", "add", "ok", "2"),
        ToolResult("call_0_2", "add", "ok", "6"),
    ]
    assert found[1].message() == {"role": "tool", "tool_call_id": "call_0_1", "content": "2"}
    assert pickle.loads(pickle.dumps((calls, found, LIMITS))) == (calls, found, LIMITS)


@pytest.mark.parametrize(
    ("made", "status", "text"),
    [
        (MalformedCall("call_0_0", "json", "no"), "malformed", "Error: malformed tool call: no. What follows it was not read."),
        (call("sub", a=1), "unknown", "Error: there is no tool 'sub'; the tools are: add, later, fails"),
        (call("add", a="1"), "arguments", "Error: wrong arguments for add: a: '1' is not of type 'integer'"),
        (call("add", a=1, c=2), "arguments", "Error: wrong arguments for add: Additional properties are not allowed"),
        (call("fails", how="raise"), "error", "Error: fails failed: RuntimeError: no network (test_toolbox.py:"),
        (call("fails", how="exit"), "error", "Error: fails failed: SystemExit: 1 (test_toolbox.py:"),
        (call("fails", how="flood"), "ok", "x" * 128 + "...(truncated)..." + "x" * 128),
        (call("fails", how="surrogate"), "ok", "?"),
    ],
)  # fmt: skip
def test_whatever_a_call_does_wrong_is_text_for_the_model_and_counted(made: Any, status: str, text: str) -> None:
    box, (first, second) = session([add, later, fails], lambda box: box.run([made, call("add", 1, a=1)]))
    assert (first.id, first.status) == ("call_0_0", status) and first.text.startswith(text) and "\n" not in first.text
    assert second == ToolResult("call_0_1", "add", "ok", "2")
    expected = {"ok": 2} if status == "ok" else {status: 1, "ok": 1}
    assert box.counts == expected | ({"malformed/json": 1} if status == "malformed" else {})


def test_calls_beyond_the_limit_are_answered_and_not_run() -> None:
    counting = Counting("count")
    limits = ToolLimits(2, 256, "middle", 60.0)
    calls = [MalformedCall("m", "json", "x"), *(call("count", i, by=1) for i in range(4))]
    box, found = session([StatefulTool(counting)], lambda box: box.run(calls), limits)
    assert [result.status for result in found] == ["malformed", "ok", "ok", "excess", "excess"]
    assert found[-1].text == "Error: this call was not run: at most 2 per turn"
    assert sum(entry[0] == "execute" for entry in counting.log) == 2 and box.rewards == {"count": 2.0}
    assert box.data.tool_rewards == [0.25, 0.25]


def test_an_instance_lives_as_long_as_its_session() -> None:
    counting = Counting("count")

    async def body(box: ToolBox) -> list[str]:
        messages = [{"role": "user", "content": "x"}]
        return [(await box.run([call("count", by=by)], messages))[0].text for by in (1, 2)]

    kwargs = {"count": {"create_kwargs": {"start": 10}, "calc_reward_kwargs": {"scale": 1}}}
    box, texts = session([StatefulTool(counting)], body, kwargs=kwargs)
    assert texts == ["11", "13"] and box.rewards == {"count": 13.0} and counting.state == {}
    assert [entry[0] for entry in counting.log] == ["create", "execute", "execute", "calc_reward", "release"]
    # The two ways in which versions of verl pass what the data set gives.
    assert counting.log[0] == ("create", "s1", 10, {"create_kwargs": {"start": 10}})
    assert counting.log[1] == ("execute", "count-s1", {"by": 1}, [{"role": "user", "content": "x"}])
    assert counting.log[3] == ("calc_reward", "count-s1", {"scale": 1})


@pytest.mark.parametrize("method", ["create", "execute", "calc_reward", "release"])
def test_a_method_that_fails_costs_its_own_result_and_everything_is_released(method: str) -> None:
    broken, healthy = Counting("broken", failing=method), Counting("healthy")
    calls = [call("broken", 0, by=1), call("healthy", 1, by=1)]
    box, found = session([StatefulTool(broken), StatefulTool(healthy)], lambda box: box.run(calls))
    assert [result.status for result in found] == ["error" if method in ("create", "execute") else "ok", "ok"]
    assert box.rewards["healthy"] == 1.0 and ("broken" in box.rewards) == (method in ("execute", "release"))
    assert healthy.state == {} and [entry[0] for entry in healthy.log][-2:] == ["calc_reward", "release"]
    assert ("release" in [entry[0] for entry in broken.log]) == (method != "create")
    expected = {"ok": 1, "error": 1} if method in ("create", "execute") else {"ok": 2}
    assert box.counts == expected | ({} if method == "execute" else {method: 1})
    if method == "create":
        assert found[0].text.startswith("Error: broken could not be created: RuntimeError: create fails")


def test_a_session_that_fails_or_is_cancelled_releases_its_instances() -> None:
    for error in (RuntimeError("engine"), asyncio.CancelledError()):
        counting = Counting("count")

        async def body(box: ToolBox, error: BaseException = error) -> None:
            raise error

        with pytest.raises(type(error)):
            session([StatefulTool(counting)], body)
        assert [entry[0] for entry in counting.log] == ["create", "calc_reward", "release"] and counting.state == {}


def test_a_cancelled_task_waits_until_its_instances_are_released() -> None:
    entered = threading.Event()

    class Slow(Counting):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            entered.set()
            await asyncio.sleep(3600)

    counting = Slow("count")

    async def main() -> None:
        loop = SessionLoop()

        async def program() -> None:
            async with ToolBox([StatefulTool(counting)], LIMITS, session="s", loop=loop) as box:
                await box.run([call("count", by=1)])

        task = asyncio.create_task(program())
        while not entered.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [entry[0] for entry in counting.log] == ["create", "calc_reward", "release"] and counting.state == {}
        loop.close()

    asyncio.run(main())


def test_an_instance_that_is_created_during_the_cancellation_is_released_by_its_own_id() -> None:
    class Late(Counting):
        async def create(self, *args: Any, **kwargs: Any) -> Any:
            created = await super().create(*args, **kwargs)
            home.call_soon_threadsafe(task.cancel)
            cancelled.wait(60)
            return created

    counting, cancelled = Late("a"), threading.Event()

    async def program() -> None:
        async with ToolBox([StatefulTool(counting)], LIMITS, session="s", loop=loop):
            pass

    async def main() -> None:
        nonlocal home, loop, task
        home, loop = asyncio.get_running_loop(), SessionLoop()
        task = asyncio.create_task(program())
        while not task.cancelling():
            await asyncio.sleep(0.001)
        home.call_later(0.05, cancelled.set)
        with pytest.raises(asyncio.CancelledError):
            await task
        loop.close()

    home: Any = None
    loop: Any = None
    task: Any = None
    asyncio.run(main())
    assert [entry[0] for entry in counting.log] == ["create", "release"] and counting.state == {}


@pytest.mark.parametrize("cancels", [1, 3])
def test_a_task_cancelled_while_instances_are_created_or_released_releases_all(cancels: int) -> None:
    entered, go = threading.Event(), threading.Event()

    class Slow(Counting):
        async def create(self, *args: Any, **kwargs: Any) -> Any:
            if cancels == 1:
                entered.set()
                await asyncio.sleep(3600)
            return await super().create(*args, **kwargs)

        async def release(self, instance_id: str, **kwargs: Any) -> None:
            if cancels > 1:
                entered.set()
                await asyncio.to_thread(go.wait, 60)
            await super().release(instance_id, **kwargs)

    quick, slow = Counting("a"), Slow("b")

    async def main() -> None:
        loop = SessionLoop()

        async def program() -> None:
            async with ToolBox([StatefulTool(quick), StatefulTool(slow)], LIMITS, session="s", loop=loop):
                pass

        task = asyncio.create_task(program())
        while not entered.is_set() or (cancels == 1 and not quick.state):
            await asyncio.sleep(0.001)
        for _ in range(cancels):
            task.cancel()
            await asyncio.sleep(0.001)
        assert cancels == 1 or not task.done()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        loop.close()

    asyncio.run(main())
    # The cancellation may arrive before the session knows that the instance was created, whose reward then counts as failed.
    known = ["create", "calc_reward", "release"]
    assert [entry[0] for entry in quick.log] in ([known] if cancels > 1 else [known, ["create", "release"]])
    assert quick.state == slow.state == {}
    # What never began has no reward, and is released all the same.
    assert [entry[0] for entry in slow.log] == (["release"] if cancels == 1 else ["create", "calc_reward", "release"])


def test_a_row_may_have_nothing_for_a_tool() -> None:
    tools = [StatefulTool(Counting(name)) for name in "abc"]
    kwargs = {"a": {"create_kwargs": {"start": 1}}, "b": None, "c": {"create_kwargs": None}}
    assert session(tools, lambda box: asyncio.sleep(0), kwargs=kwargs)[0].rewards == {"a": 1.0, "b": 0.0, "c": 0.0}


def test_calls_of_one_id_are_counted_one_by_one() -> None:
    found = results([add], call("add", 0, a=1), call("add", 0, a=2), limits=ToolLimits(1, 256, "middle", 60.0))
    assert [result.status for result in found] == ["ok", "excess"]


def test_tools_get_messages_of_their_own_and_an_instance_without_an_id_has_that_of_the_session() -> None:
    class Careless(Counting):
        async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
            return None

        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> str:
            kwargs["agent_data"].messages[0]["content"] = "changed"
            return instance_id

    messages = [{"role": "user", "content": "x"}]
    _, found = session([StatefulTool(Careless("count"))], lambda box: box.run([call("count", by=1)], messages))
    assert (found[0].status, found[0].text, messages[0]["content"]) == ("ok", "s1", "x")


def test_an_async_function_behind_a_decorator_is_awaited() -> None:
    def plain(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return call

    decorated = tool(plain(later.function))
    assert results([decorated], call("later", text="hi")) == [ToolResult("call_0_0", "later", "ok", "hi", 0.5, {"length": 2.0})]


def test_a_tool_that_hangs_costs_its_own_session_only() -> None:
    """64 sessions at once; in 4 of them a tool blocks in synchronous code, in a function or in a coroutine."""
    release = threading.Event()

    @tool
    def hang() -> str:
        """Hang."""
        release.wait(60)
        return ""

    @tool
    async def hang_loop() -> str:
        """Hang in a coroutine."""
        release.wait(60)
        return ""

    counting = Counting("count")
    tools: list[AnyTool] = [hang, hang_loop, add, StatefulTool(counting)]

    async def one(i: int) -> tuple[list[str], dict[str, float], int]:
        loop = SessionLoop()
        hangs = i % 16 == 0
        seconds = 0.5 if hangs else 60.0
        async with ToolBox(tools, ToolLimits(4, 64, "middle", seconds), session=f"s{i}", loop=loop) as box:
            calls = [call("count", 0, by=i), call("add", 1, a=i)]
            if hangs:
                calls[1] = call("hang" if i % 32 else "hang_loop", 1)
            found = await box.run(calls)
            found += await box.run([call("count", 2, by=1)])
        loop.close()
        return [result.status for result in found], box.rewards, loop.hung

    async def main() -> list[Any]:
        return await asyncio.gather(*map(one, range(64)))

    try:
        found = asyncio.run(main())
        assert not release.is_set()
    finally:
        release.set()
    for i, (statuses, rewards, hung) in enumerate(found):
        if i % 16:
            assert (statuses, rewards, hung) == (["ok", "ok", "ok"], {"count": i + 1.0}, 0)
        else:
            # The count of a session whose own loop is blocked may or may not be made before.
            assert statuses[1:] == ["timeout", "ok"] and hung == 1
    assert counting.state == {}


@given(text=st.text(max_size=30), length=st.integers(0, 12), side=st.sampled_from(["left", "middle", "right"]))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_truncated_text_keeps_the_side_that_is_not_cut(text: str, length: int, side: Side) -> None:
    found = truncated(text, length, side)
    if len(text) <= length:
        assert found == text
        return
    start, mark, end = found.partition({"left": "(truncated)...", "middle": "...(truncated)...", "right": "...(truncated)"}[side])
    assert mark and text.startswith(start) and text.endswith(end)
    kept = {"left": (0, length), "middle": (length // 2, length // 2), "right": (length, 0)}[side]
    assert (len(start), len(end)) == kept


def test_schemas_are_those_of_all_tools_and_data_is_that_of_the_session() -> None:
    box, _ = session([add, StatefulTool(Counting("count"))], lambda box: asyncio.sleep(0), kwargs={"count": {}}, name="s7")
    assert [entry["function"]["name"] for entry in box.schemas] == ["add", "count"]
    assert box.schemas[1]["function"]["parameters"]["properties"] == {"by": {"type": "integer", "minimum": 0}}
    assert box.data == SessionData("s7", {"count": {}})
    assert json.loads(json.dumps(box.schemas)) == box.schemas


def test_random_turns_give_one_result_per_call_and_counts_that_add_up() -> None:
    rng = Random(0)
    counting = Counting("count")
    makers: list[Callable[[int], ToolCall | MalformedCall]] = [
        lambda i: call("count", i, by=1),
        lambda i: call("count", i, by=-1),
        lambda i: call("add", i, a=i),
        lambda i: call("fails", i, how=""),
        lambda i: call("none", i),
        lambda i: MalformedCall(f"call_0_{i}", "fields", "x"),
    ]
    turns = [[rng.choice(makers)(i) for i in range(rng.randint(0, 6))] for _ in range(12)]

    async def body(box: ToolBox) -> list[list[ToolResult]]:
        return [await box.run(turn) for turn in turns]

    box, found = session([add, fails, StatefulTool(counting)], body)
    assert [[result.id for result in turn] for turn in found] == [[made.id for made in turn] for turn in turns]
    flat = [result.status for turn in found for result in turn]
    assert {name: box.counts[name] for name in set(flat)} == {name: flat.count(name) for name in set(flat)}
    executed = sum(
        isinstance(made, ToolCall) and made.name == "count" and made.arguments["by"] == 1 for turn in turns for made in turn
    )
    assert box.rewards == {"count": float(executed)}
