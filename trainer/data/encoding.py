"""From messages to token ids. Loads no torch: processes that tokenise start with it."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jinja2 import TemplateError

from trainer.data.processes import in_processes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = str | list[dict[str, Any]]
"""Text that is taken as it is, or messages {role, content} for the chat template."""
Encoded = tuple[str, np.ndarray]
"""A prompt as text, and its token ids, int32."""
Truncation = Literal["error", "left", "right", "middle"]


class Refused(ValueError):
    """By a chat template."""


def render(tokenizer: PreTrainedTokenizerBase, prompt: Messages, template_kwargs: dict[str, Any]) -> str:
    """The prompt as the model reads it, up to where its answer begins. Raises Refused, or ValueError if there is no template."""
    if isinstance(prompt, str):
        return prompt
    if tokenizer.chat_template is None:
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path} has no chat template, and the prompts are chat messages: take an "
            "instruct model's tokenizer (actor_rollout_ref.model.tokenizer_path), put a chat_template.jinja into the model's "
            "directory, or give prompts as plain strings"
        )
    try:
        text = tokenizer.apply_chat_template(prompt, **({"add_generation_prompt": True} | template_kwargs), tokenize=False)
    except (ValueError, TypeError, TemplateError) as error:
        raise Refused(
            f"the chat template refuses it: {error}; leave out {reprlib.repr(prompt)}, or set data.apply_chat_template_kwargs"
        ) from error
    assert isinstance(text, str)
    return text


def encode(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Messages], template_kwargs: dict[str, Any]) -> list[Encoded]:
    """Text and token ids of each prompt. A template writes its special tokens; plain text gets the tokenizer's (BOS, if any)."""
    texts = [render(tokenizer, prompt, template_kwargs) for prompt in prompts]
    ids: dict[int, np.ndarray] = {}
    for plain in (False, True):
        where = [i for i, prompt in enumerate(prompts) if isinstance(prompt, str) == plain]
        ids |= zip(where, token_ids(tokenizer, [texts[i] for i in where], special=plain), strict=True)
    return [(text, ids[i]) for i, text in enumerate(texts)]


def encode_all(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Messages], template_kwargs: dict[str, Any], workers: int | None = None
) -> list[Encoded]:
    """What encode() gives, in parts and, of many prompts, in several processes. workers: see in_processes."""
    return in_processes(partial(_encode, tokenizer, template_kwargs), prompts, "prompts are tokenised", workers)


def _encode(tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any], prompts: Sequence[Messages]) -> list[Encoded]:
    return encode(tokenizer, prompts, template_kwargs)


def token_ids(tokenizer: PreTrainedTokenizerBase, texts: list[str], *, special: bool) -> list[np.ndarray]:
    """int32 ids of each text, with the tokenizer's special tokens around it if ``special``."""
    if not texts:
        return []
    rows = tokenizer(texts, add_special_tokens=special, return_attention_mask=False, verbose=False)["input_ids"]
    return [np.array(row, dtype=np.int32) for row in rows]  # a tenth of the memory of lists


def truncate(ids: np.ndarray, max_length: int, how: Literal["left", "right", "middle"]) -> np.ndarray:
    """``ids`` without what is over max_length; ``how`` names the part that goes."""
    over = len(ids) - max_length
    if over <= 0:
        return ids
    match how:
        case "left":
            return ids[over:]
        case "right":
            return ids[:max_length]
        case "middle":
            head = max_length // 2
            return np.concatenate([ids[:head], ids[head + over :]])
