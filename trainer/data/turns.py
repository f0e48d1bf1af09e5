"""Tokenise conversations and find the assistant's tokens. Does not import torch, so that tokenising processes start fast.

Problem: chat templates are programs that render text; they do not report which tokens belong to which turn, and some render a
message differently when it is the last one. Idea: if the template marks turns with {% generation %}, use the marks. Otherwise
render every prefix of the conversation: a turn starts where its prompt (with the generation prompt, as in RL) ends, provided
that prompt is a token prefix of the whole conversation, and ends where the conversation up to it ends. If any of these
comparisons fails, the row is rejected instead of trained with a wrong mask. Cost: two more renderings per assistant turn.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateError

from trainer.data.encoding import Messages, Refused, encode, render, token_ids
from trainer.data.processes import in_processes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from trainer.data.files import Rows

ROLES = ("system", "developer", "user", "assistant")
UNKNOWN = "the assistant's tokens cannot be determined"
MARK_THEM = "mark them in the template with {% generation %} and {% endgeneration %}"
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class Turns:
    """An encoded conversation.

    ids: int64 (n,). trained: bool (n,), the assistant's tokens and the end token of each of its turns. n_turns: number of
    assistant turns. n_empty: those without text. n_open: those without an end token.
    """

    ids: np.ndarray
    trained: np.ndarray
    n_turns: int
    n_empty: int
    n_open: int

    def up_to_the_end(self) -> np.ndarray:
        """ids without anything that the template writes after the last assistant turn, such as a newline."""
        return self.ids[: int(np.flatnonzero(self.trained)[-1]) + 1]


class TurnEncoder:
    """Encoder of pairs and conversations.

    Raises ValueError, one line, for a tokenizer without an EOS token: a model could not learn to stop.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any]) -> None:
        if tokenizer.eos_token_id is None:
            raise ValueError(f"the tokenizer of {tokenizer.name_or_path} has no EOS token: a model could not learn to stop")
        self.tokenizer = tokenizer
        self.template_kwargs = template_kwargs

    def pairs(self, rows: Rows, prompts: Sequence[Messages], answers: Sequence[str]) -> list[Turns]:
        """Encode each prompt as in RL, followed by its response and EOS. Raises ValueError, one line, for non-text responses."""
        for row, answer in enumerate(answers):
            if not isinstance(answer, str):
                raise ValueError(f"{rows.where(row)}: the response is a {type(answer).__name__}; must be text")
        return in_processes(self._pairs, list(zip(prompts, answers, strict=True)), "pairs are tokenised")

    def _pairs(self, pairs: Sequence[tuple[Messages, str]]) -> list[Turns]:
        encoded = encode(self.tokenizer, [prompt for prompt, _ in pairs], self.template_kwargs)
        answers = [answer for _, answer in pairs]
        found = []
        for (_, prompt), answer, ids in zip(encoded, answers, token_ids(self.tokenizer, answers, special=False), strict=True):
            whole = np.concatenate([prompt, ids, [self.tokenizer.eos_token_id]]).astype(np.int64)
            found.append(Turns(whole, np.arange(len(whole)) >= len(prompt), 1, int(not answer.strip()), 0))
        return found

    def chats(self, rows: Rows, chats: Sequence[Any]) -> list[Turns]:
        """Encode each conversation with the chat template; EOS ends the last turn if the template does not.

        Assistant tokens are those the template marks with {% generation %}; without marks, those after the prompt of a turn up
        to its end token. Raises ValueError, one line, for anything but conversations of texts, and if a turn's prompt is not a
        prefix of the whole conversation.
        """
        placed = [(rows.where(row), messages) for row, messages in enumerate(chats)]
        return in_processes(self._chats, placed, "conversations are tokenised")

    def _chats(self, placed: Sequence[tuple[str, Any]]) -> list[Turns]:
        return [self.chat(where, messages) for where, messages in placed]

    def chat(self, where: str, messages: Any) -> Turns:
        """Encode one conversation. where: its location, for error messages."""
        messages = texts_alone(where, messages)
        try:
            ids, spans = self._by_marks(messages) if self._marked else self._by_prefixes(where, messages)
        except TemplateError as error:
            raise ValueError(f"{where}: the chat template rejects it: {error}") from error
        except Refused as error:
            raise ValueError(f"{where}: {error}") from error
        trained = np.zeros(len(ids), dtype=bool)
        n_open, is_open = 0, False
        for start, end in spans:
            end, is_open = self._end(ids, start, end)
            trained[start:end] = True
            n_open += is_open
        contents = [message["content"] for message in messages if message["role"] == "assistant"]
        if is_open and messages[-1]["role"] == "assistant":
            ids, trained = np.append(ids, self.tokenizer.eos_token_id), np.append(trained, True)
            n_open -= 1
        return Turns(ids.astype(np.int64), trained, len(contents), sum(not text.strip() for text in contents), n_open)

    def _by_marks(self, messages: list[dict[str, str]]) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """Token ids and spans [start, end) of the assistant's turns, from the template's {% generation %} marks."""
        found: Any = self.tokenizer.apply_chat_template(
            messages, **self.template_kwargs, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        edges = np.flatnonzero(np.diff(found["assistant_masks"], prepend=0, append=0))
        return np.array(found["input_ids"]), [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]

    def _by_prefixes(self, where: str, messages: list[dict[str, str]]) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """Token ids and spans [start, end) of the assistant's turns, from renderings of prefixes of the conversation."""
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        texts = [self._render(messages)]
        for turn in turns:
            texts += [self._render(messages[:turn], add_generation_prompt=True), self._render(messages[: turn + 1])]
        whole, *prefixes = token_ids(self.tokenizer, texts, special=False)
        # Token prefixes, not text prefixes: a token that spans the boundary would be trained on a prompt that RL never produces.
        spans = []
        for turn, before, after in zip(turns, prefixes[::2], prefixes[1::2], strict=True):
            if not _begins(whole, before):
                raise ValueError(
                    f"{where}, message {turn}: {UNKNOWN}: the prompt that the chat template renders for it (with "
                    "add_generation_prompt) is not a prefix of the whole conversation, so training and generation would see "
                    f"different prompts; {MARK_THEM}"
                )
            end = len(after) if _begins(whole, after) else self._end_of_rewritten(messages, turn, texts[0], whole)
            if end is None:
                raise ValueError(
                    f"{where}, message {turn}: {UNKNOWN}: the chat template renders the conversation up to this turn differently "
                    f"than within the whole one, and a token spans the end of the turn; {MARK_THEM}"
                )
            spans.append((len(before), end))
        return whole, spans

    def _end_of_rewritten(self, messages: list[dict[str, str]], turn: int, text: str, whole: np.ndarray) -> int | None:
        """End of a turn in ``whole``, the tokens of ``text``, if the template renders last turns differently.

        None if a token spans the end of the turn.
        """
        # The text after a turn's content is the common suffix of two renderings with different contents. A special token at its
        # start ends the turn only if it does so in a conversation that stops at this turn, too: that is the token a model has to
        # generate. For GPT-OSS it is not: earlier turns end with <|end|>, the last one with <|return|>.
        behind, behind_last = self._behind(messages, turn, text), self._behind(messages[: turn + 1], turn)
        head = text.removesuffix(behind)
        until, mark, last_mark = token_ids(self.tokenizer, [head, behind.lstrip(), behind_last.lstrip()], special=False)
        if not _begins(whole, until):
            return None
        if not len(mark) or not len(last_mark) or mark[0] != last_mark[0] or int(mark[0]) not in self._special:
            return len(until)
        return len(until) + int(np.flatnonzero(whole[len(until) :] == mark[0])[0]) + 1

    def _behind(self, messages: list[dict[str, str]], turn: int, text: str | None = None) -> str:
        """Text that the template writes after the content of a turn. text: the rendered conversation."""
        text = self._render(messages) if text is None else text
        # A character of Unicode's private use area that does not occur in the text replaces the content.
        other = next(letter for letter in map(chr, range(0xE000, 0xF900)) if letter not in text)
        changed = [*messages[:turn], messages[turn] | {"content": other}, *messages[turn + 1 :]]
        same = takewhile(lambda pair: pair[0] == pair[1], zip(reversed(text), reversed(self._render(changed)), strict=False))
        return text[len(text) - sum(1 for _ in same) :]

    def _render(self, messages: list[dict[str, str]], *, add_generation_prompt: bool = False) -> str:
        return render(self.tokenizer, messages, self.template_kwargs | {"add_generation_prompt": add_generation_prompt})

    def _end(self, ids: np.ndarray, start: int, end: int) -> tuple[int, bool]:
        """End of the turn [start, end), exclusive, and whether it has no end token.

        The turn ends after its last special token; whitespace that the template writes after it does not belong to the turn. An
        EOS directly after the span, outside the template's marks, does.
        """
        last = end
        while last > start and not str(self.tokenizer.decode(ids[last - 1 : last])).strip():
            last -= 1
        if last > start and int(ids[last - 1]) in self._special:
            return last, False
        if end < len(ids) and ids[end] == self.tokenizer.eos_token_id:
            return end + 1, False
        return end, True

    @cached_property
    def _marked(self) -> bool:
        return MARKS.search(str(self.tokenizer.chat_template)) is not None

    @cached_property
    def _special(self) -> set[int]:
        added = self.tokenizer.added_tokens_decoder
        return {*self.tokenizer.all_special_ids, *(number for number, token in added.items() if token.special)}


def texts_alone(where: str, messages: Any) -> list[dict[str, str]]:
    """Messages reduced to role and content. Raises ValueError, one line, if they contain anything but text."""
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise ValueError(f"{where}: not a conversation; expected a list of messages {{role, content}}")
    for i, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise ValueError(f"{where}, message {i}: the role is {role!r}; supported are {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise ValueError(f"{where}, message {i}: the content is a {type(content).__name__}; only text is supported")
        # Tool calls, images or reasoning fields would be dropped silently, and another conversation trained.
        more = sorted(name for name, value in message.items() if name not in ("role", "content") and value not in (None, [], ""))
        if more:
            raise ValueError(f"{where}, message {i}: has {', '.join(more)} besides role and content; only text is supported")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _begins(whole: np.ndarray, part: np.ndarray) -> bool:
    return np.array_equal(whole[: len(part)], part)
