"""The tools of one session: instances, parallel calls, limits, errors as text for the model.

A session is a trajectory. Everything that a tool does wrong ends as text for the model and as a count; nothing is raised. Calls
and results are plain data, so that a tool box can run in another process than the program that calls it: one that is killed and
replaced when a tool takes the process with it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal

from trainer.agents.arguments import problem
from trainer.agents.formats import MalformedCall, ToolCall
from trainer.agents.isolation import SessionLoop, UserCodeError, to_the_end
from trainer.agents.tools import AnyTool, FunctionTool, StatefulTool, ToolOutput
from trainer.data.encoding import Message

Side = Literal["left", "middle", "right"]
Status = Literal["ok", "malformed", "unknown", "arguments", "excess", "timeout", "error"]


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """Limits of a session's calls.

    max_parallel_calls: calls of a turn that are run; the others are answered with an error. max_tool_response_length: characters
    that are kept of a result. tool_response_truncate_side: where the others are cut. seconds: of a call.
    """

    max_parallel_calls: int
    max_tool_response_length: int
    tool_response_truncate_side: Side
    seconds: float


@dataclass(frozen=True, slots=True)
class ToolResult:
    """Result of a call. text: for the model, truncated. status: "ok", or what went wrong; text then says it.

    "excess": more calls than max_parallel_calls. seconds: in user code.
    """

    id: str
    name: str
    status: Status
    text: str
    reward: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: float = field(default=0.0, compare=False)

    def message(self) -> Message:
        """The result as a message of OpenAI's chat completions."""
        return {"role": "tool", "tool_call_id": self.id, "content": self.text}


@dataclass(slots=True)
class SessionData:
    """``agent_data`` of verl's tools: what a call may know about its session. extra_fields: for the tools' own use."""

    request_id: str
    tools_kwargs: Mapping[str, Mapping[str, Any]]
    messages: list[Message] = field(default_factory=list)
    tool_rewards: list[float] = field(default_factory=list)
    extra_fields: dict[str, Any] = field(default_factory=dict)


class ToolBox:
    """Tools of one session, a context manager: creates the instances, and takes their rewards and releases them at the end.

    counts: calls by status; malformed ones also as "malformed/<kind>", and failed "create", "calc_reward" and "release".
    rewards: of calc_reward, by tool, after the end; a tool whose calc_reward failed is not in it.
    """

    def __init__(
        self,
        tools: Sequence[AnyTool],
        limits: ToolLimits,
        *,
        session: str,
        loop: SessionLoop,
        kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """session: unique name, the id of the instances. kwargs: verl's ``tools_kwargs`` of the data set's row:
        {tool: {create_kwargs, execute_kwargs, calc_reward_kwargs, release_kwargs}}.
        """
        self.limits = limits
        self.counts: Counter[str] = Counter()
        self.rewards: dict[str, float] = {}
        self.data = SessionData(session, kwargs or {})
        self._tools = {tool.name: tool for tool in tools}
        self._loop = loop
        self._instances: dict[str, str] = {}
        self._failed: dict[str, str] = {}
        """Tool -> why it could not be created."""

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """OpenAI function schemas, for the chat template."""
        return [tool.schema for tool in self._tools.values()]

    async def run(self, calls: Sequence[ToolCall | MalformedCall], messages: Sequence[Message] = ()) -> list[ToolResult]:
        """Run the calls of a turn, in parallel; the results are in the order of the calls. messages: the conversation so far."""
        self._show(messages)
        runnable = [i for i, call in enumerate(calls) if isinstance(call, ToolCall)]
        excess = {*runnable[self.limits.max_parallel_calls :]}
        results = await asyncio.gather(*(self._one(call, i in excess) for i, call in enumerate(calls)))
        self._count(calls, results)
        return results

    async def repeat(
        self, calls: Sequence[ToolCall | MalformedCall], results: Sequence[ToolResult], messages: Sequence[Message] = ()
    ) -> None:
        """Bring the tools to the state after a turn whose results are known: run again only what changes an instance."""
        self._show(messages)
        await asyncio.gather(*(self._again(call, result) for call, result in zip(calls, results, strict=True)))
        self._count(calls, results)

    def _show(self, messages: Sequence[Message]) -> None:
        """Give the conversation to the tools that can see it: their own copy, which they may change."""
        if self._stateful():
            self.data.messages = deepcopy([*messages])

    async def _again(self, call: ToolCall | MalformedCall, result: ToolResult) -> None:
        # A call that exceeded its time would do so again, and left no defined state.
        if isinstance(call, MalformedCall) or result.status not in ("ok", "error") or call.name in self._failed:
            return
        if isinstance(tool := self._tools[call.name], StatefulTool):
            with suppress(UserCodeError):  # counted by its result
                await self._execute(tool, call.arguments)

    def _count(self, calls: Sequence[ToolCall | MalformedCall], results: Sequence[ToolResult]) -> None:
        self.counts.update(result.status for result in results)
        self.counts.update(f"malformed/{call.kind}" for call in calls if isinstance(call, MalformedCall))
        self.data.tool_rewards += [result.reward for result in results if result.status == "ok"]

    async def _one(self, call: ToolCall | MalformedCall, excess: bool) -> ToolResult:
        if isinstance(call, MalformedCall):
            return self._error(call.id, "", "malformed", f"malformed tool call: {call.error}. What follows it was not read.")
        if excess:
            most = self.limits.max_parallel_calls
            return self._error(call.id, call.name, "excess", f"this call was not run: at most {most} per turn")
        tool = self._tools.get(call.name)
        if tool is None:
            names = ", ".join(self._tools) or "none"
            return self._error(call.id, call.name, "unknown", f"there is no tool {call.name!r:.60}; the tools are: {names}")
        if (wrong := problem(call.arguments, tool.check)) is not None:
            return self._error(call.id, call.name, "arguments", f"wrong arguments for {call.name}: {wrong}")
        if call.name in self._failed:
            return self._error(call.id, call.name, "error", self._failed[call.name])
        start = time.monotonic()
        try:
            output = await self._execute(tool, call.arguments)
        except UserCodeError as error:
            status: Status = "timeout" if error.late else "error"
            return self._error(call.id, call.name, status, f"{call.name} failed: {error}", time.monotonic() - start)
        text, seconds = self._shown(output.text), time.monotonic() - start
        if output.failed:
            return self._error(call.id, call.name, "error", f"{call.name} failed: {output.text}", seconds)
        return ToolResult(call.id, call.name, "ok", text, output.reward, output.metrics, seconds)

    async def _execute(self, tool: AnyTool, arguments: Mapping[str, Any]) -> ToolOutput:
        seconds = self.limits.seconds
        if isinstance(tool, FunctionTool):
            return await self._loop.run(tool.bind(arguments), seconds=seconds)
        kwargs = {**self._kwargs(tool, "execute"), "agent_data": self.data}
        return await self._loop.run(tool.execute, self._instances[tool.name], dict(arguments), kwargs, seconds=seconds)

    def _error(self, id: str, name: str, status: Status, text: str, seconds: float = 0.0) -> ToolResult:
        return ToolResult(id, name, status, self._shown(f"Error: {text}"), seconds=seconds)

    def _shown(self, text: str) -> str:
        # Tools may return halves of surrogate pairs, which no tokenizer takes.
        cut = truncated(text, self.limits.max_tool_response_length, self.limits.tool_response_truncate_side)
        return cut.encode(errors="replace").decode()

    async def __aenter__(self) -> ToolBox:
        try:
            await asyncio.gather(*(self._create(tool) for tool in self._stateful()))
        except BaseException:  # cancelled: without __aexit__
            await to_the_end(self._close())
            raise
        return self

    async def _create(self, tool: StatefulTool) -> None:
        # Known before: a tool that exceeds the limit while it creates the instance may have to release it all the same.
        self._instances[tool.name] = self.data.request_id
        self._failed[tool.name] = f"{tool.name} was not created"

        async def create() -> None:
            # In the session's thread: a cancellation may arrive before its result does.
            self._instances[tool.name] = await tool.create(self.data.request_id, self._kwargs(tool, "create"))

        try:
            await self._loop.run(create, seconds=self.limits.seconds)
            del self._failed[tool.name]
        except UserCodeError as error:
            self.counts["create"] += 1
            self._failed[tool.name] = f"{tool.name} could not be created: {error}"
            if not error.late:
                del self._instances[tool.name]

    async def __aexit__(self, *error: object) -> None:
        await to_the_end(self._close())

    async def _close(self) -> None:
        await asyncio.gather(*(self._release(tool) for tool in self._stateful() if tool.name in self._instances))

    async def _release(self, tool: StatefulTool) -> None:
        async def release() -> None:
            await tool.release(self._instances.pop(tool.name), self._kwargs(tool, "release"))

        seconds = self.limits.seconds
        if tool.name not in self._failed:
            instance = self._instances[tool.name]
            try:
                reward = self._loop.run(tool.calc_reward, instance, self._kwargs(tool, "calc_reward"), seconds=seconds)
                self.rewards[tool.name] = await reward
            except UserCodeError:
                self.counts["calc_reward"] += 1
        try:
            await self._loop.run(release, seconds=seconds)
        except UserCodeError:
            self.counts["release"] += 1

    def _stateful(self) -> list[StatefulTool]:
        return [tool for tool in self._tools.values() if isinstance(tool, StatefulTool)]

    def _kwargs(self, tool: AnyTool, method: str) -> Mapping[str, Any]:
        return (self.data.tools_kwargs.get(tool.name) or {}).get(f"{method}_kwargs") or {}


def truncated(text: str, length: int, side: Side) -> str:
    """The text with at most ``length`` of its characters, and a mark where others were cut, as in verl.

    side: of the text that is cut. left keeps the end, right the start, middle as many of both.
    """
    if len(text) <= length:
        return text
    if side == "right":
        return f"{text[:length]}...(truncated)"
    if side == "left":
        return f"(truncated)...{text[len(text) - length :]}"
    half = length // 2
    return f"{text[:half]}...(truncated)...{text[len(text) - half :]}"
