"""Check of a chat template: does each prompt begin with the prompt before it and its turn (append-only), and if not, why?

Problem: training and generation see the same tokens only as long as a template appends to a conversation, and many templates
render a turn differently once another one follows. Idea: render short conversations whose texts are words that occur nowhere
else. The first difference between a turn and the next prompt, and the words on either side of it, show what the template did.
Cost: about 40 renderings, a few milliseconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from trainer.data.encoding import Refused
from trainer.data.seam import Break, Seams, appended, first_difference

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EXCERPT, TAG = 24, 12  # characters: of an example, and between the start of a tag and the first difference


class Cause(StrEnum):
    """What a template does, as the end of a sentence."""

    # Earlier text changes, so the conversation is not append-only.
    DROPS_THINKING = "drops the thinking of earlier turns"
    EMPTY_THINKING = "writes an empty thinking block in the last turn only"
    MOVES = "moves the system prompt or the tools"
    CHANGES_END = "ends a turn with another token if a turn follows"
    CHANGES_SPACE = "changes the white space of earlier turns"
    REWRITES = "renders earlier turns differently"
    OPENS = "ends the prompt with text that the turn itself lacks"
    # Earlier text stays as it was rendered, without something that the messages contain or with something added at the end.
    CLOSES = "writes more after the end of the last turn"
    TRIMS = "trims white space around a message"
    OMITS_THINKING = "does not render thinking"
    OMITS = "does not render the system prompt, tools or tool results"
    REJECTS = "rejects the conversation"


HARMLESS = frozenset({Cause.CLOSES, Cause.TRIMS, Cause.OMITS_THINKING, Cause.OMITS, Cause.REJECTS})

SYSTEM, TOOLS, CALLED, RESULT, THOUGHT, SPACED = "xsystem", "xtools", "xcalled", "xresult", "xthought", "xspaced"
SCHEMA = {"name": "f", "description": TOOLS, "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {"a": CALLED}}}


def _user(number: int) -> dict[str, Any]:
    return {"role": "user", "content": f"xasked{number}"}


def _turn(number: int, before: str = "") -> dict[str, Any]:
    return {"role": "assistant", "content": f"{before}xanswer{number}"}


def _calls(thought: int | None = None) -> list[dict[str, Any]]:
    call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": CALL["id"], "content": RESULT}
    return [call if thought is None else _thinks(thought, call), result]


def _thinks(thought: int, turn: dict[str, Any]) -> dict[str, Any]:
    return turn | {"reasoning_content": f"{THOUGHT}{thought}"}


_INLINE = f"<think>\n{THOUGHT}1\n</think>\n\n"
_SPACED = {"role": "assistant", "content": f"\n {SPACED} \n"}
PROBES: dict[str, list[dict[str, Any]]] = {
    "text": [_user(1), _turn(1), _user(2), _turn(2), _user(3)],
    "system": [{"role": "system", "content": SYSTEM}, _user(1), _turn(1), _user(2), _turn(2), _user(3)],
    "white space": [_user(1), _SPACED, _user(2), _turn(2), _user(3)],
    "thinking in the content": [_user(1), _turn(1, _INLINE), _user(2), _turn(2), _user(3)],
    "thinking": [_user(1), _thinks(1, _turn(1)), _user(2), _thinks(2, _turn(2)), _user(3)],
    "tools": [_user(1), *_calls(), *_calls(), _turn(1), _user(2), *_calls(), _turn(2), _user(3)],
    "tools and thinking": [_user(1), *_calls(1), *_calls(2), _thinks(3, _turn(1)), _user(2)],
}
"""Conversations by what they contain; each ends with the user."""
OF_TEXT = ("text", "system", "white space", "thinking in the content")
"""Probes of conversations {role, content}, as in supervised training."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a template does in the conversation ``probe``.

    follows: role of the message after the turn; "" for a difference between the turn and its own prompt, and for findings about
    single messages. detail: an example, or the template's error.
    """

    cause: Cause
    probe: str
    follows: str
    detail: str


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """All findings about a chat template, in the order of the probes."""

    findings: tuple[Finding, ...]

    def append_only(self, probe: str) -> bool:
        """Whether every turn of conversations such as ``probe`` is part of the next prompt, unchanged."""
        return not any(found.probe == probe and found.cause not in HARMLESS for found in self.findings)

    def note(self, consequence: str) -> str | None:
        """One line about what makes the template not append-only, and its consequence; None if nothing does."""
        first: dict[tuple[Cause, str], Finding] = {}
        for found in self.findings:
            if found.cause not in HARMLESS:
                first.setdefault((found.cause, found.follows), found)
        if not first:
            return None
        when = {"user": "where a user message follows, ", "tool": "where a tool result follows, ", "": ""}
        places = [f"{found.cause} ({when[found.follows]}{found.detail})" for found in first.values()]
        return f"the chat template is not append-only: it {'; it '.join(places)}. {consequence}"


def check_template(
    tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any], probes: Sequence[str] = tuple(PROBES)
) -> TemplateReport:
    """Check the tokenizer's chat template on these probes. Raises ValueError if it has none."""
    seams = Seams(tokenizer, template_kwargs)
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    first: dict[tuple[Cause, str, str], Finding] = {}
    for found in (found for probe in probes for found in _findings(seams, special, probe)):
        first.setdefault((found.cause, found.probe, found.follows), found)
    return TemplateReport(tuple(first.values()))


def _findings(seams: Seams, special: set[int], probe: str) -> Iterator[Finding]:
    messages = PROBES[probe]
    tools = [{"type": "function", "function": SCHEMA}] if any("tool_calls" in message for message in messages) else None
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    try:
        prompts = [seams.render(messages[:turn], tools, prompt=True) for turn in (*turns, len(messages))]
        texts = [seams.render(messages[: turn + 1], tools, prompt=False) for turn in turns]
    except Refused as error:
        yield Finding(Cause.REJECTS, probe, "", str(error.__cause__))
        return
    everything = prompts[-1]
    expected = [SYSTEM] * (probe == "system") + [TOOLS, RESULT] * (tools is not None)
    if any(word not in everything for word in expected):
        yield Finding(Cause.OMITS, probe, "", ", ".join(word for word in expected if word not in everything))
    if any(messages[turn].get("reasoning_content", "") not in text for turn, text in zip(turns, texts, strict=True)):
        yield Finding(Cause.OMITS_THINKING, probe, "", "reasoning_content")
    if probe == "white space" and _SPACED["content"] not in texts[0]:
        yield Finding(Cause.TRIMS, probe, "", repr(_SPACED["content"]))
    for turn, prompt, text, following in zip(turns, prompts, texts, prompts[1:], strict=False):
        if isinstance(appended(prompt, text), Break):
            yield _finding(probe, "", prompt, text, _lost(prompt, text) or Cause.OPENS)
        elif isinstance(appended(text.rstrip(), following), Break):
            word = (messages[turn]["content"] or CALLED).split()[-1]
            written = text.rfind(word) + len(word) if word in text[len(prompt) :] else len(prompt)
            stops = [number for number in seams.ids(text[written:]) if number in special]
            ended = seams.up_to_stop(prompt, text, stops[0]) if stops else None
            is_closed = isinstance(ended, str) and first_difference(ended, following) is None
            cause = Cause.CLOSES if is_closed else _cause(text, following, len(prompt), written)
            yield _finding(probe, messages[turn + 1]["role"], text, following, cause)


def _cause(text: str, following: str, start: int, written: int) -> Cause:
    """Why ``following`` does not continue ``text``. start: of its last turn. written: end of the content of that turn."""
    if (cause := _lost(text, following)) is not None:
        return cause
    if _squeezed(following).startswith(_squeezed(text)):
        return Cause.CHANGES_SPACE
    at = first_difference(text, following)
    assert at is not None
    if at >= written:
        return Cause.CHANGES_END
    return Cause.EMPTY_THINKING if "think" in text[start:written] else Cause.REWRITES


def _lost(before: str, after: str) -> Cause | None:
    """The cause that shows in words that ``after`` has elsewhere or not at all."""
    if any(before.find(word) != after.find(word) for word in (SYSTEM, TOOLS)):
        return Cause.MOVES
    return Cause.DROPS_THINKING if any(thought not in after for thought in re.findall(rf"{THOUGHT}\d", before)) else None


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _finding(probe: str, follows: str, before: str, after: str, cause: Cause) -> Finding:
    at = first_difference(before, after)
    assert at is not None
    # From the start of a tag that the two have in common, such as <| of two special tokens.
    tag = before.rfind("<", max(at - TAG, 0), at + 1)
    at = at if tag < 0 else tag
    detail = f"{before[at:][:EXCERPT]!r} becomes {after[at:][:EXCERPT]!r}"
    return Finding(cause, probe, follows, detail)
