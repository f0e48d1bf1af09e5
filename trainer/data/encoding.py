"""From messages to token ids. Loads no torch: processes that tokenise for the filter start with it."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jinja2 import TemplateError

from workers.controller.stop import die_with_parent

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = str | list[dict[str, Any]]
"""Text that is taken as it is, or messages {role, content} for the chat template."""
Encoded = tuple[str, np.ndarray]
"""A prompt as text, and its token ids, int32."""
Truncation = Literal["error", "left", "right", "middle"]
PART = 1024  # prompts that are tokenised at a time


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
    encoded: list[Encoded] = []
    for start in range(0, len(prompts), PART):
        part = prompts[start : start + PART]
        texts = [render(tokenizer, prompt, template_kwargs) for prompt in part]
        ids: dict[int, np.ndarray] = {}
        for plain in (False, True):
            where = [i for i, prompt in enumerate(part) if isinstance(prompt, str) == plain]
            ids |= zip(where, token_ids(tokenizer, [texts[i] for i in where], special=plain), strict=True)
        encoded += [(text, ids[i]) for i, text in enumerate(texts)]
    return encoded


def encode_in_processes(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Messages], template_kwargs: dict[str, Any], workers: int
) -> list[Encoded]:
    """What encode() gives, from so many processes at most; one, or little to do: from this one."""
    parts = [prompts[start : start + PART] for start in range(0, len(prompts), PART)]
    workers = min(workers, len(parts))
    if workers <= 1:
        return encode(tokenizer, prompts, template_kwargs)
    context = get_context("spawn")  # a fork would inherit locks of torch's and the tokenizer's threads
    with ProcessPoolExecutor(workers, context, _start_child, (os.getpid(), tokenizer, template_kwargs)) as pool:
        return [item for part in pool.map(_encode_part, parts) for item in part]


_child: tuple[PreTrainedTokenizerBase, dict[str, Any]]


def _start_child(parent: int, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any]) -> None:
    global _child
    die_with_parent(parent)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _child = (tokenizer, template_kwargs)


def _encode_part(prompts: Sequence[Messages]) -> list[Encoded]:
    tokenizer, template_kwargs = _child
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
