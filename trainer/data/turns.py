"""Tokenise conversations and find the assistant's tokens. Does not import torch, so that tokenising processes start fast.

Problem: chat templates are programs that render text; they do not report which tokens belong to which turn, and some render a
turn differently once another follows (without its thinking, with another end token), so that no rendering of the whole
conversation contains every turn as it is generated. Idea: if the template marks turns with {% generation %}, use the marks.
Otherwise render the prompt of each turn, as in RL, and the conversation up to its end: the turn is the difference. It shares a
row with the next turn if that turn's prompt begins with it, and ends the row if not. Each turn is thus trained once, after the
tokens that generation would see. Cost: two renderings per assistant turn; tokens of a row are repeated in the next one.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateError

from trainer.data.encoding import (
    Message,
    Messages,
    Refused,
    encode,
    lone_surrogate,
    parsed,
    token_ids,
    with_text_arguments,
    without_null,
)
from trainer.data.processes import in_processes
from trainer.data.seam import Break, Seams, appended

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from trainer.data.files import Rows

OPTIONAL: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("system", "developer", "user"), ()),
    "assistant": ("tool_calls",),
    "tool": ("tool_call_id", "name"),
}
"""Roles, and the fields that their messages may have besides role and content."""
MARK_THEM = "mark the assistant's tokens in the template with {% generation %} and {% endgeneration %}"
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class Turns:
    """A row of an encoded conversation.

    ids: int64 (n,). trained: bool (n,), the assistant's tokens and the end token of each of its turns. n_turns: number of
    assistant turns that are trained in this row. n_empty: those without text. n_open: those without an end token.
    """

    ids: np.ndarray
    trained: np.ndarray
    n_turns: int
    n_empty: int
    n_open: int

    def up_to_the_end(self) -> np.ndarray:
        """ids without anything that the template writes after the last assistant turn, such as a newline."""
        return self.ids[: int(np.flatnonzero(self.trained)[-1]) + 1]

    def last_turn(self) -> int:
        """Position of the first token of the last assistant turn; at least 1, because nothing predicts the first token."""
        before = np.flatnonzero(~self.trained[: len(self.up_to_the_end())])
        return int(before[-1]) + 1 if len(before) else 1


Row = tuple[np.ndarray, list[tuple[int, int]], list[str], bool]
"""Token ids, trained spans [start, end), contents of the assistant turns, and whether the last one ends the row."""


class TurnEncoder:
    """Encoder of pairs and conversations.

    Raises ValueError, one line, for a tokenizer without an EOS token: a model could not learn to stop.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any]) -> None:
        if tokenizer.eos_token_id is None:
            raise ValueError(f"the tokenizer of {tokenizer.name_or_path} has no EOS token: a model could not learn to stop")
        self.tokenizer = tokenizer
        self.template_kwargs = template_kwargs
        self._seams = Seams(tokenizer, template_kwargs)
        self._rendered: set[str] = set()

    def pairs(self, rows: Rows, prompts: Sequence[Messages], answers: Sequence[str]) -> list[Turns]:
        """Encode each prompt as in RL, followed by its response and EOS. Raises ValueError, one line, for non-text responses."""
        for row, answer in enumerate(answers):
            if not isinstance(answer, str):
                raise ValueError(f"{rows.where(row)}: the response is a {type(answer).__name__}; must be text")
        placed = [(rows.where(row), *item) for row, item in enumerate(zip(prompts, answers, strict=True))]
        return in_processes(self._pairs, placed, "pairs are tokenised")

    def _pairs(self, placed: Sequence[tuple[str, Messages, str]]) -> list[Turns]:
        try:
            encoded = encode(self.tokenizer, [prompt for _, prompt, _ in placed], self.template_kwargs)
        except Refused:
            for where, messages, _ in placed:
                self._check_prompt(where, messages)
            raise
        answers = [answer for _, _, answer in placed]
        for where, _, answer in placed:
            if problem := lone_surrogate(answer):
                raise ValueError(f"{where}: the response: {problem}")
        found = []
        for (_, prompt), answer, ids in zip(encoded, answers, token_ids(self.tokenizer, answers, special=False), strict=True):
            whole = np.concatenate([prompt, ids, [self.tokenizer.eos_token_id]]).astype(np.int64)
            found.append(Turns(whole, np.arange(len(whole)) >= len(prompt), 1, int(not answer.strip()), 0))
        return found

    def _check_prompt(self, where: str, prompt: Messages) -> None:
        try:
            encode(self.tokenizer, [prompt], self.template_kwargs)
        except Refused as error:
            raise Refused(f"{where}: {error}") from error

    def chats(
        self, rows: Rows, chats: Sequence[Any], tools: Sequence[Any] | None = None, *, last: bool = False
    ) -> list[list[Turns]]:
        """Encode each conversation with the chat template, into one row or several; see ``chat``. tools: of each conversation."""
        each = [None] * len(chats) if tools is None else tools
        placed = [(rows.where(row), *item) for row, item in enumerate(zip(chats, each, strict=True))]
        return in_processes(partial(self._chats, last), placed, "conversations are tokenised")

    def _chats(self, last: bool, placed: Sequence[tuple[str, Any, Any]]) -> list[list[Turns]]:
        return [self.chat(where, messages, tools, last=last) for where, messages, tools in placed]

    def chat(self, where: str, messages: Any, tools: Any = None, *, last: bool = False) -> list[Turns]:
        """Encode one conversation into rows in which each assistant turn is trained once, in order.

        It is one row if the template marks turns with {% generation %}, which are then the trained tokens, or renders a turn in
        the prompt of the next one as when it was the last. Otherwise a turn that is rendered differently later ends its row.
        EOS ends the last turn of a row if the template does not. where: location of the conversation, for error messages. tools:
        OpenAI function schemas that the template renders, a list or its JSON text. last: only the row of the last assistant turn.

        Raises ValueError, one line, for anything but a conversation of texts, calls and their results, and for a turn that does
        not continue its prompt.
        """
        messages = _checked_messages(where, messages)
        tools = _checked_tools(where, tools)
        self._check_rendered(where, messages, tools)
        try:
            rows = [self._by_marks(messages, tools, last)] if self.is_marked else self._by_prompts(where, messages, tools, last)
        except (TemplateError, TypeError) as error:
            raise ValueError(f"{where}: the chat template rejects it: {error}") from error
        except Refused as error:
            raise ValueError(f"{where}: {error}") from error
        return [self._turns(*row) for row in rows]

    def _check_rendered(self, where: str, messages: list[Message], tools: list[Any] | None) -> None:
        """Raise ValueError, one line, if the template ignores tools or calls; the first conversation that has them shows it."""
        bare = [{name: value for name, value in message.items() if name != "tool_calls"} for message in messages]
        for what, is_here, changed in (
            ("tools", tools is not None, (messages, None)),
            ("tool calls", bare != messages, (bare, tools)),
        ):
            if is_here and what not in self._rendered:
                self._rendered.add(what)
                # A template that rejects the conversation without them does not ignore them.
                with suppress(Refused):
                    if self._seams.render_calls(*changed, prompt=False) == self._seams.render_calls(
                        messages, tools, prompt=False
                    ):
                        raise ValueError(
                            f"{where}: the chat template does not render {what}: use a template that does "
                            "(model.custom_chat_template), or leave them out of the data"
                        )

    def _turns(self, ids: np.ndarray, spans: list[tuple[int, int]], contents: list[str], ends: bool) -> Turns:
        trained = np.zeros(len(ids), dtype=bool)
        n_ended, is_open = 0, False
        for start, end in spans:
            end, is_open = self._end(ids, start, end)
            trained[start:end] = True
            n_ended += not is_open
        if is_open and ends:
            ids, trained = np.append(ids, self.tokenizer.eos_token_id), np.append(trained, True)
            n_ended += 1
        # Marks may select several spans of a turn, of which only the last one ends it, or none.
        n_open = max(min(len(contents), len(spans)) - n_ended, 0)
        return Turns(ids.astype(np.int64), trained, len(contents), sum(not text.strip() for text in contents), n_open)

    def _by_marks(self, messages: list[Message], tools: list[Any] | None, last: bool) -> Row:
        """The whole conversation as a row, with the spans of the template's {% generation %} marks.

        An end token directly after the marks belongs to its turn. last: the spans of the last turn are one, from its first marked
        token to its end. Raises Refused if the end of the last turn or, with ``last``, its start is unknown.
        """
        ids, spans = self._marked(messages, tools)
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        contents = [_content(messages[turn]) for turn in turns]
        if last and turns:
            if not spans:
                raise Refused("the chat template marks no token of the last turn")
            first = self._spans_before(messages[: turns[-1]], tools, ids, spans, contents)
            spans = [*spans[:first], (spans[first][0], spans[-1][1])]
        spans = self._with_ends(messages, tools, ids, spans)
        ends = messages[-1]["role"] == "assistant"
        if ends and contents[-1].strip() and spans and self._end(ids, *spans[-1])[1]:
            if rest := str(self.tokenizer.decode(ids[spans[-1][1] :])).strip():
                raise Refused(
                    f"the chat template writes {reprlib.repr(rest)} after the tokens of the last turn that it marks, so it is "
                    "not known which token ends the turn; put the end of turns before {% endgeneration %}"
                )
            # EOS follows the turn directly: a model does not generate the whitespace that the template writes after it.
            ids = ids[: spans[-1][1]]
        return ids, spans, contents, ends

    def _with_ends(
        self, messages: list[Message], tools: list[Any] | None, ids: np.ndarray, spans: list[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """The marked spans, each with the end token of its turn if the template writes it after the marks."""
        after = {i: self._special_after(ids, span[1]) for i, span in enumerate(spans) if self._end(ids, *span)[1]}
        wanted = {int(ids[at]) for at in after.values() if at is not None}
        # The special token may also be the first one of the next message. What follows a turn that ends the conversation is not.
        known = {self.tokenizer.eos_token_id}
        for turn in reversed(range(len(messages))):
            if wanted <= known:
                break
            if messages[turn]["role"] == "assistant":
                own = messages[turn]
                # Of a blank turn marks may select nothing.
                shown = own if _content(own).strip() else {"role": "assistant", "content": "x"}
                is_all = turn == len(messages) - 1 and shown is own
                whole, marked = (ids, spans) if is_all else self._marked([*messages[:turn], shown], tools)
                at = self._special_after(whole, marked[-1][1]) if marked else None
                known |= set() if at is None else {int(whole[at])}
        found = []
        for i, (start, end) in enumerate(spans):
            at = after.get(i)
            found.append((start, at + 1 if at is not None and int(ids[at]) in known else end))
        return found

    def _spans_before(
        self,
        earlier: list[Message],
        tools: list[Any] | None,
        ids: np.ndarray,
        spans: list[tuple[int, int]],
        contents: list[str],
    ) -> int:
        """Number of ``spans`` in the messages ``earlier``, those before the last turn.

        ids, spans: of the whole conversation. contents: of its assistant turns. Raises Refused if it is unknown.
        """
        if len(spans) == len(contents) and all(map(str.strip, contents)):
            return len(spans) - 1
        before, marked = self._marked(earlier, tools) if earlier else (ids[:0], [])
        if len(marked) < len(spans) and (not marked or _begins(ids, before[: marked[-1][1]])):
            return len(marked)
        raise Refused(
            f"the chat template marks {len(spans)} spans of tokens in {len(contents)} assistant turns, and not which of them are "
            "the last turn's; mark each turn once, from its first token to its end"
        )

    def _marked(self, messages: list[Message], tools: list[Any] | None) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """Token ids of the conversation, and the spans that the template marks."""
        more = self.template_kwargs | ({} if tools is None else {"tools": tools})
        more |= {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        try:
            found: Any = self.tokenizer.apply_chat_template(messages, **more)
        except TypeError:  # as in Seams.render_calls
            found = self.tokenizer.apply_chat_template([with_text_arguments(message) for message in messages], **more)
        edges = np.flatnonzero(np.diff(found["assistant_masks"], prepend=0, append=0)).reshape(-1, 2)
        return np.array(found["input_ids"]), [(int(start), int(end)) for start, end in edges]

    def _by_prompts(self, where: str, messages: list[Message], tools: list[Any] | None, last: bool) -> list[Row]:
        """Rows from the renderings of each turn's prompt, and of the conversation up to its end."""
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"][-1 if last else 0 :]
        texts = []
        for turn in turns:
            texts.append(self._seams.render_calls(messages[:turn], tools, prompt=True))
            texts.append(self._seams.render_calls(messages[: turn + 1], tools, prompt=False))
        if messages[-1]["role"] != "assistant":
            texts.append(self._seams.render_calls(messages, tools, prompt=False))
        encoded = token_ids(self.tokenizer, texts, special=False)
        rows: list[Row] = []
        spans: list[tuple[int, int]] = []
        contents: list[str] = []
        for i, turn in enumerate(turns):
            prompt, text = texts[2 * i : 2 * i + 2]
            before, ids = encoded[2 * i : 2 * i + 2]
            if isinstance(answer := appended(prompt, text), Break):
                raise ValueError(
                    f"{where}, message {turn}: it does not continue its own prompt (with add_generation_prompt), so training and "
                    f"generation would see different prompts: {answer.detail}; {MARK_THEM}"
                )
            if not _begins(ids, before):
                # A token spans the end of the prompt. RL samples a turn after the prompt's own tokens.
                ids = np.append(before, token_ids(self.tokenizer, [answer], special=False)[0])
            start, end = len(before), None
            if 2 * i + 2 < len(encoded):
                end = self._end_within(encoded[2 * i + 2], start, ids, messages[: turn + 1], tools, prompt, text)
            spans.append((start, len(ids) if end is None else end))
            contents.append(_content(messages[turn]))
            if end is None:
                rows.append((ids, spans, contents, True))
                spans, contents = [], []
        if spans or not turns:
            rows.append((encoded[-1], spans, contents, False))
        return rows

    def _end_within(
        self,
        following: np.ndarray,
        start: int,
        ids: np.ndarray,
        messages: list[Message],
        tools: list[Any] | None,
        prompt: str,
        text: str,
    ) -> int | None:
        """End of the last turn of ``messages`` in the tokens ``following`` of a longer conversation; None if it is not in them.

        start: its first token. prompt: that of the turn. text, ids: the conversation up to its end.
        """
        end, _ = self._end(ids, start, len(ids))
        if _begins(following, ids[:end]):
            return end
        # A template may write more behind the last turn of a conversation (Phi-3: EOS). The turn is complete without it if the
        # special token after its content, which a model has to generate, is the same in the longer conversation. In a turn with
        # calls it is the token before them, and text follows: up_to_stop returns a Break, and the turn ends its row.
        mark = token_ids(self.tokenizer, [self._behind(messages, tools, text).lstrip()], special=False)[0]
        if not len(mark) or int(mark[0]) not in self._special:
            return None
        turn = self._seams.up_to_stop(prompt, text, int(mark[0]))
        end = 0 if isinstance(turn, Break) else len(token_ids(self.tokenizer, [turn], special=False)[0])
        return end if end and _begins(following, ids[:end]) else None

    def _behind(self, messages: list[Message], tools: list[Any] | None, text: str) -> str:
        """Text that the template writes after the content of the last message. text: the rendered conversation."""
        # A character of Unicode's private use area that does not occur in the text replaces the content.
        other = next(letter for letter in map(chr, range(0xE000, 0xF900)) if letter not in text)
        changed = self._seams.render_calls([*messages[:-1], messages[-1] | {"content": other}], tools, prompt=False)
        same = takewhile(lambda pair: pair[0] == pair[1], zip(reversed(text), reversed(changed), strict=False))
        return text[len(text) - sum(1 for _ in same) :]

    def _end(self, ids: np.ndarray, start: int, end: int) -> tuple[int, bool]:
        """End of the turn [start, end), exclusive, and whether it has no end token.

        The turn ends after its last special token; whitespace that the template writes after it does not belong to the turn.
        """
        last = end
        while last > start and self._is_blank(ids[last - 1]):
            last -= 1
        return (last, False) if last > start and int(ids[last - 1]) in self._special else (end, True)

    def _special_after(self, ids: np.ndarray, end: int) -> int | None:
        """Position of the special token that follows ids[:end], with at most whitespace between; None if text follows."""
        at = next((at for at in range(end, len(ids)) if not self._is_blank(ids[at])), None)
        return at if at is not None and int(ids[at]) in self._special else None

    def _is_blank(self, token: int) -> bool:
        return not str(self.tokenizer.decode([token])).strip()

    @cached_property
    def is_marked(self) -> bool:
        """Whether the template marks the assistant's tokens, so that a conversation is one row."""
        return MARKS.search(str(self.tokenizer.chat_template)) is not None

    @cached_property
    def _special(self) -> set[int]:
        added = self.tokenizer.added_tokens_decoder
        return {*self.tokenizer.all_special_ids, *(number for number, token in added.items() if token.special)}


def _content(message: Message) -> str:
    """Text of an assistant turn, or the names of its calls."""
    return message["content"] or " ".join(call["function"]["name"] for call in message.get("tool_calls", ()))


def _checked_messages(where: str, messages: Any) -> list[Message]:
    """The messages, parsed, with empty texts for null contents of calls. Raises ValueError, one line, for unsupported ones."""
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise ValueError(f"{where}: not a conversation; expected a list of messages {{role, content}}")
    found: list[Message] = []
    for i, message in enumerate(messages):
        here = f"{where}, message {i}"
        # Files have null or empty fields where another message of the column has a value.
        kept = {name: value for name, value in message.items() if name in ("role", "content") or value not in (None, [], "")}
        role, content = kept.get("role"), kept.get("content")
        if role not in OPTIONAL:
            raise ValueError(f"{here}: the role is {role!r}; supported are {', '.join(OPTIONAL)}")
        if content is None and "tool_calls" in kept and role == "assistant":
            content = ""  # As the agents write it: some templates reject null.
        if not isinstance(content, str):
            raise ValueError(f"{here}: the content is a {type(content).__name__}; only text is supported")
        if problem := lone_surrogate(content):
            raise ValueError(f"{here}: {problem}")
        # Images or reasoning fields would be dropped silently, and another conversation trained.
        if more := sorted(kept.keys() - {"role", "content", *OPTIONAL[role]}):
            raise ValueError(f"{here}: has {', '.join(more)} besides role and content; only text and tool calls are supported")
        calls = kept.get("tool_calls", [])
        if not isinstance(calls, list) or not all(map(_is_call, calls)):
            raise ValueError(f"{here}: tool_calls must be a list of {{type, function: {{name, arguments}}}}, as in OpenAI's API")
        if problem := lone_surrogate(json.dumps(calls, ensure_ascii=False, default=str)):
            raise ValueError(f"{here}: tool_calls: {problem}")
        if calls:
            kept["tool_calls"] = [without_null(call) for call in calls]
        found.append({"role": role, "content": content} | kept | {"content": content})
    return parsed(found)


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return (
        isinstance(function, dict) and isinstance(function.get("name"), str) and isinstance(function.get("arguments"), str | dict)
    )


def _checked_tools(where: str, tools: Any) -> list[Any] | None:
    """Function schemas; None without any. Raises ValueError, one line, for anything else."""
    try:
        tools = json.loads(tools) if isinstance(tools, str) and tools else tools
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: the tools are not JSON: {error}") from error
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"{where}: the tools are not a list of function schemas, or its JSON text")
    return [without_null(tool) for tool in tools]


def _begins(whole: np.ndarray, part: np.ndarray) -> bool:
    return np.array_equal(whole[: len(part)], part)
