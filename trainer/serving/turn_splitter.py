"""A turn of the model while it is generated: which of its text is certainly content, and which is thinking.

Problem: clients want text as soon as it is sampled, but what looks like text may begin a tool call. Idea: everything up to the
first place at which a call may begin is given out, the rest when the turn has ended and is parsed as a whole. What was given out
before is then always a prefix of the message, so that a stream and a reply have the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer.agents.formats import AssistantTurn, Format, ToolCall, parse_turn

_THINKING, _END_OF_THINKING = "<think>", "</think>"
ANYWHERE = {"hermes": ("<tool_call>",), "qwen3": ("<tool_call>",), "qwen3_coder": ("<tool_call>",)}
"""By call format: what begins a call. In other formats a call is the whole response."""
AT_START = {"llama3_json": ("{", "<|python_tag|>"), "pythonic": ("[",)}
"""By call format: how a response that is a call begins. Of a user's own format nothing is known: its responses are not split."""


class _Trimmed:
    """Text without the whitespace around it, as it arrives."""

    def __init__(self) -> None:
        self.given = ""
        self._space = ""

    def add(self, text: str) -> str:
        text = self._space + (text if self.given else text.lstrip())
        new = text.rstrip()
        self._space = text[len(new) :] if self.given or new else ""
        self.given += new
        return new


class TurnSplitter:
    """Splits the text of one turn. in_thinking: the prompt ends within a thinking block."""

    def __init__(self, format_name: str | None, format: Format | None, tools: Sequence[Any], *, in_thinking: bool) -> None:
        """format_name, format: of calls; None: the turn has no calls."""
        self._format, self._tools, self._in_thinking = format, tools, in_thinking
        known = format_name is None or format_name in ANYWHERE or format_name in AT_START
        self._anywhere = () if format is None else (_THINKING, *ANYWHERE.get(str(format_name), ()))
        self._at_start = () if format is None else (_THINKING, *AT_START.get(str(format_name), ())) if known else ("",)
        self._whole = self._rest = ""
        self._state = "thinking" if in_thinking else "start"
        self._thinking, self._content = _Trimmed(), _Trimmed()

    def add(self, text: str) -> tuple[str, str]:
        """Thinking and content that are certain now."""
        self._whole += text
        self._rest += text
        thinking = content = ""
        if self._state == "start":
            begun = self._rest.lstrip()
            if begun.startswith(_THINKING):
                self._state, self._rest = "thinking", begun[len(_THINKING) :]
            elif not _THINKING.startswith(begun):
                self._state = "first"
        if self._state == "thinking":
            end = self._rest.find(_END_OF_THINKING)
            kept = end if end >= 0 else len(self._rest) - _open_end(self._rest, (_END_OF_THINKING,))
            thinking = self._thinking.add(self._rest[:kept])
            self._rest = self._rest[kept:]
            if end >= 0:
                self._state, self._rest = "first", self._rest[len(_END_OF_THINKING) :]
        if self._state == "first":
            begun = self._rest.lstrip()
            if any(begun.startswith(opener) for opener in self._at_start):
                self._state = "held"
            elif begun and not any(opener.startswith(begun) for opener in self._at_start):
                self._state = "content"
        if self._state == "content":
            found = [at for opener in self._anywhere if (at := self._rest.find(opener)) >= 0]
            kept = min(found) if found else len(self._rest) - _open_end(self._rest, self._anywhere)
            content = self._content.add(self._rest[:kept])
            self._rest = self._rest[kept:]
            self._state = "held" if found else "content"
        return thinking, content

    def end(self, *, truncated: bool, turn: int) -> tuple[str, str, tuple[ToolCall, ...]]:
        """Thinking, content and calls of the whole turn. truncated: it has no calls. turn: see parse_turn."""
        if self._format is None or truncated:
            thinking, content = _split(self._whole, self._in_thinking)
            return thinking.strip(), content.strip(), ()
        parsed: AssistantTurn = parse_turn(self._format, self._whole, self._tools, turn=turn, in_thinking=self._in_thinking)
        message = parsed.message()
        calls = tuple(call for call in parsed.calls if isinstance(call, ToolCall))
        return message.get("reasoning_content", ""), message["content"], calls

    def rest(self, thinking: str, content: str) -> tuple[str, str]:
        """What ``add`` has not returned of the thinking and the content of ``end``."""
        return thinking[len(self._thinking.given) :], content[len(self._content.given) :]


def _split(text: str, in_thinking: bool) -> tuple[str, str]:
    """Thinking and content of a text without calls."""
    begun = text.lstrip()
    if not in_thinking and not begun.startswith(_THINKING):
        return "", text
    thinking, _, content = (text if in_thinking else begun[len(_THINKING) :]).partition(_END_OF_THINKING)
    return thinking, content


def _open_end(text: str, openers: Sequence[str]) -> int:
    """Number of characters at the end of ``text`` that may begin one of ``openers``."""
    longest = max(map(len, openers), default=0)
    ends = range(min(len(text), longest - 1), 0, -1)
    return next((n for n in ends if any(opener.startswith(text[-n:]) for opener in openers)), 0)
