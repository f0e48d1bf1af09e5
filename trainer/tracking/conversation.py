"""Conversations for people: turns with calls, results and rewards, cut so that files, pages and terminals stay small.

Text of models and tools is hostile: control characters would reach the terminal or reorder a line, and a turn may have megabytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.agents.messages import THINKING

MOST_TEXT = 1_000
"""Characters that are kept of a text, half of them at each end."""
MOST_TURNS = 32
"""Messages that are kept of a conversation: the first 24 and the last 8."""
MOST_LAST = 8
MOST_CALLS = 8  # of a turn
LINE = 120
"""Characters of a turn in a terminal."""
LINES = 10
# C0 and C1 controls but for line breaks and tabs, marks that reorder text, and halves of surrogate pairs.
_HIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def conversation_of(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Turns of a session, JSON: role, text and sampled; calls [[name, arguments]], thinking, name (of the tool that a result is
    of), status, reward and truncated where there are any.

    messages: of ``AgentSession.marked``. sampled: the model wrote it in this session; it is trained, and nothing else is.
    """
    tools = {
        call.get("id"): call.get("function", call).get("name") for message in messages for call in message.get("tool_calls") or ()
    }
    turns = [_turn(message, tools) for message in messages]
    if (more := len(turns) - MOST_TURNS) > 0:
        left_out = {"role": "", "text": f"{more} messages are left out here", "sampled": False}
        turns = [*turns[: MOST_TURNS - MOST_LAST], left_out, *turns[-MOST_LAST:]]
    return turns


def _turn(message: Mapping[str, Any], tools: Mapping[Any, Any]) -> dict[str, Any]:
    content = message.get("content")
    text = content if isinstance(content, str) else "" if content is None else json.dumps(content)
    turn: dict[str, Any] = {"role": shortened(str(message.get("role"))), "text": shortened(text)}
    turn["sampled"] = bool(message.get("sampled"))
    if thinking := next((message[name] for name in THINKING if message.get(name)), None):
        turn["thinking"] = shortened(str(thinking))
    if calls := [call.get("function", call) for call in message.get("tool_calls") or ()]:
        turn["calls"] = [
            [shortened(str(call.get("name"))), shortened(arguments_of(call.get("arguments")))] for call in calls[:MOST_CALLS]
        ]
        if (more := len(calls) - MOST_CALLS) > 0:
            turn["calls"].append(["", f"and {more} more calls"])
    if name := tools.get(message.get("tool_call_id")) if "tool_call_id" in message else None:
        turn["name"] = shortened(str(name))
    return turn | {name: message[name] for name in ("status", "reward", "truncated") if name in message}


def arguments_of(arguments: Any) -> str:
    """Arguments of a call as a program has them: ``a=1, b="x"``. arguments: an object, or its JSON."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return str(arguments)
    if not isinstance(arguments, Mapping):
        return json.dumps(arguments, ensure_ascii=False)
    return ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in arguments.items())


def shortened(text: str, most: int = MOST_TEXT) -> str:
    """The text with visible control characters; without its middle, and a note instead, if it has more than ``most``."""
    if len(text) > most:
        half = most // 2
        text = f"{text[:half]} … {len(text) - 2 * half:,} characters are left out here … {text[-half:]}"
    return visible(text)


def visible(text: str) -> str:
    """Text whose control characters are written as codes: ``\\x1b``, ``\\u202e``."""
    return _HIDDEN.sub(lambda found: ascii(found[0])[1:-1], text)


def split_prompt(turns: Sequence[Mapping[str, Any]]) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
    """What the session began with, and all from the first turn of the model on."""
    first = next((i for i, turn in enumerate(turns) if turn["sampled"]), len(turns))
    return turns[:first], turns[first:]


def lines_of(turns: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, bool]]:
    """(role, what was written, in one line, whether it was sampled) of at most LINES turns, for a terminal."""
    lines = [(f"{turn['role']} {turn.get('name', '')}".strip(), _line(turn), turn["sampled"]) for turn in turns]
    if (more := len(lines) - LINES) > 0:
        half = LINES // 2
        lines = [*lines[:half], ("", f"… {more} turns are left out here", False), *lines[-half:]]
    return lines


def _line(turn: Mapping[str, Any]) -> str:
    # The text first, then its calls, as the model wrote them.
    written = [turn["text"], *(f"{name}({arguments})" if name else arguments for name, arguments in turn.get("calls", ()))]
    text = " ".join(" ".join(written).split())
    notes = [f"reward {turn['reward']:g}"] if "reward" in turn else []
    notes += ["truncated"] if turn.get("truncated") else []
    text = text if len(text) <= LINE else f"{text[:LINE]} … ({len(text):,} characters)"
    return text + (f"  [{', '.join(notes)}]" if notes else "")
