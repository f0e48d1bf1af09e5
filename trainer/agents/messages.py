"""Chat messages of an agent, compared. Formats follow OpenAI's chat completions."""

from __future__ import annotations

import json
import reprlib
from typing import Any

from trainer.data.encoding import Message

THINKING = ("reasoning_content", "reasoning", "thinking")
"""Fields with a model's thinking."""
_SORTED = json.JSONEncoder(sort_keys=True)
"""json.dumps makes a new one for each text with sorted keys."""


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
    return _SORTED.encode(kept)


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
