"""Continue a conversation's token ids where a sampled turn ended. Does not import torch, so that processes of agents start fast.

Problem: the ids of a sampled turn are final, but the next prompt is text, which the chat template renders from scratch; tokenised
anew, the turn may get other ids. Idea: if the template only appends to the conversation as it was rendered directly after the
turn, and the turn ended with an added token, only what follows that token is tokenised. Tokenizers split text at added tokens
first, so these ids are the same after any text. Anything else is a Break: the conversation has to be tokenised as a new prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer.data.encoding import render, render_calls, token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EXCERPT = 30  # characters


@dataclass(frozen=True, slots=True)
class Break:
    """Why a conversation cannot be continued.

    reason: "template": its text is rendered differently; "seam": no added token ends its last turn. detail: part of a sentence.
    """

    reason: str
    detail: str


def first_difference(before: str, after: str) -> int | None:
    """Index of the first character at which ``after`` does not continue ``before``; None if ``before`` is a prefix of it."""
    if after.startswith(before):
        return None
    return next((i for i, (one, other) in enumerate(zip(before, after, strict=False)) if one != other), len(after))


def appended(before: str, after: str) -> str | Break:
    """Text of ``after`` that follows ``before``, or where they differ."""
    at = first_difference(before, after)
    if at is None:
        return after[len(before) :]
    here = f"{_excerpt(before[at:])} after {_excerpt(before[:at], last=True)}"
    return Break("template", f"the chat template rendered {here} before, and now {_excerpt(after[at:])}")


class Seams:
    """Seams of conversations: the places where a tokenizer's text continues after a sampled turn."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any]) -> None:
        self.tokenizer = tokenizer
        self.template_kwargs = template_kwargs
        self._added = {number: token.content for number, token in tokenizer.added_tokens_decoder.items()}

    def render(self, messages: list[dict[str, Any]], tools: list[Any] | None = None, *, prompt: bool) -> str:
        """Render messages with the chat template. prompt: up to the start of the assistant's next turn. Raises as ``render``."""
        return render(self.tokenizer, messages, self._arguments(tools, prompt=prompt))

    def render_calls(self, messages: list[dict[str, Any]], tools: list[Any] | None, *, prompt: bool) -> str:
        """``render`` of parsed messages, also by a template that wants the arguments of calls as text."""
        return render_calls(self.tokenizer, messages, self._arguments(tools, prompt=prompt))

    def _arguments(self, tools: list[Any] | None, *, prompt: bool) -> dict[str, Any]:
        more = {"add_generation_prompt": prompt} | ({} if tools is None else {"tools": tools})
        return self.template_kwargs | more

    def up_to_stop(self, prompt: str, conversation: str, stop: int) -> str | Break:
        """The part of ``conversation`` up to the stop token of its last turn.

        prompt: rendering of what precedes that turn, with the generation prompt. conversation: rendering that ends with the turn,
        without a generation prompt. stop: last token id of the turn as it was sampled.
        """
        if isinstance(turn := appended(prompt, conversation), Break):
            return turn
        text = self._added.get(stop)
        if text is None:
            return Break("seam", f"its last token, {stop}, is not an added token of the tokenizer")
        # The last one: what the model wrote may contain the text of the token.
        head, found, tail = turn.rpartition(text)
        if not found:
            return Break("seam", f"the chat template does not write {text}, its last token")
        if tail and not tail.isspace():
            # Only the template's end of a conversation may follow. Text is a sign that the token found is part of the content.
            ids = self.ids_after(stop, tail)
            if isinstance(ids, Break) or any(number not in self._added and self._decode(number).strip() for number in ids):
                return Break("seam", f"the chat template writes {_excerpt(tail)} after {text}, its last token")
        return prompt + head + text

    def ids_after(self, stop: int, text: str) -> list[int] | Break:
        """Token ids of ``text`` where it follows the added token ``stop``; independent of anything before that token."""
        # With the token in front: some take the whitespace that follows them (rstrip, as in Phi-3), and tokenizers that mark the
        # start of a text (SentencePiece) would mark this one.
        first, *ids = self.ids(self._added[stop] + text)
        if first != stop:
            return Break("seam", f"{self._added[stop]} is not tokenised as one token before {_excerpt(text)}")
        return ids

    def ids(self, text: str) -> list[int]:
        """Token ids of rendered text; templates write special tokens themselves."""
        return token_ids(self.tokenizer, [text], special=False)[0].tolist()

    def text(self, ids: list[int]) -> str:
        """Text of token ids, with special tokens and exactly as the tokens spell it."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _decode(self, number: int) -> str:
        return str(self.tokenizer.decode([number]))


def _excerpt(text: str, *, last: bool = False) -> str:
    short = text[-EXCERPT:] if last else text[:EXCERPT]
    return repr(short) if text else "nothing"
