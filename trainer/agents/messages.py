"""Chat messages of an agent: as templates take them, and compared. Formats follow OpenAI's chat completions."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]
THINKING = ("reasoning_content", "reasoning", "thinking")
"""Fields with a model's thinking."""


def parsed(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Deep copies of messages, with the arguments of their calls as values, and without null fields other than content."""
    # Many templates write arguments that are text as a JSON string (Qwen2.5, Llama 3.1), and test only if tool_calls is there.
    kept = [{name: value for name, value in message.items() if value is not None or name == "content"} for message in messages]
    copies = json.loads(json.dumps(kept))
    return [_with_arguments(copy, lambda value: _value(value) if isinstance(value, str) else value) for copy in copies]


def with_text_arguments(message: Message) -> Message:
    """The message with the arguments of its calls as JSON text, for templates that concatenate them (DeepSeek-V3)."""
    return _with_arguments(message, lambda value: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def canonical(message: Message, *, without: tuple[str, ...] = ()) -> str:
    """JSON text, equal for two parsed messages if they mean the same; fields in ``without`` are not compared.

    Null, absent and empty fields are equal. Ids and positions of calls are not compared: programs choose them freely, and where
    a template writes them, its text decides.
    """
    kept = {name: value for name, value in message.items() if value not in (None, "", []) and name not in without}
    kept.pop("tool_call_id", None)
    if "tool_calls" in kept:
        functions = [call.get("function", call) for call in kept["tool_calls"]]
        kept["tool_calls"] = [[function.get("name"), function.get("arguments")] for function in functions]
    return json.dumps(kept, sort_keys=True)


def call_ids(messages: list[Message]) -> list[Any]:
    """Ids of all calls, in order."""
    return [call.get("id") for message in messages for call in message.get("tool_calls", [])]


def difference(message: Message, recorded: Message) -> str:
    """The first field that differs, in words. Both messages are parsed."""
    for name in sorted(message.keys() | recorded.keys()):
        now, before = ({name: m[name]} if name in m else {} for m in (message, recorded))
        if canonical(now) != canonical(before):
            return f"its {name} is {reprlib.repr(now.get(name))} and was {reprlib.repr(before.get(name))} when it was sampled"
    return "it is the message that was sampled"


def _with_arguments(message: Message, change: Any) -> Message:
    def changed(call: Message) -> Message:
        if "function" in call:
            return call | {"function": changed(call["function"])}
        return call | {"arguments": change(call["arguments"])} if "arguments" in call else call

    return message | {"tool_calls": [changed(call) for call in message["tool_calls"]]} if "tool_calls" in message else message


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:  # what a model wrote need not be JSON
        return text
