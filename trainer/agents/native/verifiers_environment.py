"""Classic environments of the package ``verifiers`` (0.3: SingleTurnEnv, MultiTurnEnv, ToolEnv).

verifiers drives a rollout itself and asks a client for each turn of the model. Here that client waits for the session's turn, so
that everything else (stop conditions, tools, the rubric's scores) is the package's own code.
"""

from __future__ import annotations

import asyncio
import time
from importlib import import_module
from typing import Any

from trainer.agents.environments import Environment, EnvironmentStep
from trainer.agents.messages import Message


class VerifiersEnvironment(Environment):
    """Base class: set ``env``, at the top of the file: the package installs signal handlers, in the main thread.

    A task is row ``extra_info["index"]`` of the environment's data set. The reward is that of the rubric, with the last turn.
    """

    env: Any = None

    def __init__(self) -> None:
        self._asked: asyncio.Queue[list[Message]] = asyncio.Queue()
        self._answers: asyncio.Queue[Message] = asyncio.Queue()
        self._rollout: asyncio.Task[Any] | None = None
        self._seen: list[Message] = []

    def row(self, task: Any) -> dict[str, Any]:
        """Row of the data set that a task is about."""
        return dict(self.env.get_dataset()[task.extra_info["index"]])

    async def reset(self, task: Any) -> list[Message]:
        self._rollout = asyncio.ensure_future(self._play(self.row(task)))
        messages = await self._next()
        if messages is None:
            raise ValueError("the environment ended before the first turn")
        self._seen = messages
        return messages

    async def step(self, message: Message) -> EnvironmentStep:
        assert self._rollout is not None, "reset starts it"
        self._answers.put_nowait(message)
        messages = await self._next()
        if messages is None:
            state = self._rollout.result()
            return EnvironmentStep([], state["reward"], True, {"metrics": state["metrics"] or {}})
        n = len(self._seen)
        if messages[:n] != self._seen or len(messages) <= n or messages[n]["role"] != "assistant":
            raise ValueError("the environment changed earlier messages; only those that append messages are supported")
        self._seen = messages
        return EnvironmentStep(messages[n + 1 :], 0.0, False, {})

    async def close(self) -> None:
        if self._rollout is not None:
            self._rollout.cancel()
            await asyncio.wait({self._rollout})

    async def _next(self) -> list[Message] | None:
        """The conversation before the next turn of the model; None at the end. Raises what the rollout raised."""
        assert self._rollout is not None, "reset starts it"
        asked = asyncio.ensure_future(self._asked.get())
        await asyncio.wait({asked, self._rollout}, return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            return asked.result()
        asked.cancel()
        if (error := self._rollout.result()["error"]) is not None:
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        return None

    async def _play(self, row: dict[str, Any]) -> Any:
        base = import_module("verifiers.clients").Client
        # Its other methods are for conversions to an HTTP client, which there is none of.
        unused = dict.fromkeys(base.__abstractmethods__)
        client = type("SessionClient", (base,), unused | {"get_response": self._response})(None)
        state = await self.env.rollout(row, client, "policy", {})
        if state["error"] is None:
            await self.env.rubric.score_rollout(state)
        await self.env.rubric.cleanup(state)
        return state

    async def _response(self, prompt: Any, model: str, *args: Any, **kwargs: Any) -> Any:
        types = import_module("verifiers.types")
        self.tools = [_schema(tool) for tool in kwargs.get("tools") or ()]
        self._asked.put_nowait([_message(message) for message in prompt])
        answer = await self._answers.get()
        calls = [types.ToolCall(id=call["id"], **call["function"]) for call in answer.get("tool_calls", ())]
        message = types.ResponseMessage(
            content=answer["content"],
            reasoning_content=answer.get("reasoning_content"),
            tool_calls=calls or None,
            finish_reason="tool_calls" if calls else "stop",
            is_truncated=False,
        )
        return types.Response(id="turn", created=int(time.time()), model=model, message=message)


def _schema(tool: Any) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _message(message: Any) -> Message:
    found: Message = message.model_dump(exclude_none=True)
    if calls := found.pop("tool_calls", None):
        named = [{"name": call["name"], "arguments": call["arguments"]} for call in calls]
        found["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": function} for call, function in zip(calls, named, strict=True)
        ]
    return {"content": None, **found}
