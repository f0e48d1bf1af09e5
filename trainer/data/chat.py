"""Between messages and token ids. All tokenizers live on the controller."""

import os
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from configs.schema.common import ModelConfig

Prompt = str | list[dict[str, Any]]
"""Text that is taken as it is, or messages {role, content} for the chat template."""
Truncation = Literal["error", "left", "right", "middle"]
Encoded = tuple[str, np.ndarray]
"""A prompt as text, and its token ids, int32."""
PART = 1024  # prompts that are tokenised at a time


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of ``tokenizer_path``, or of the model. Raises ValueError if there is none."""
    path = os.path.expanduser(model.tokenizer_path or model.path)
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"no tokenizer at {path}: {' '.join(str(error).split())}") from error


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, model: ModelConfig) -> tuple[int, ...]:
    """Tokens that end an answer: the tokenizer's EOS, and those of the model's generation_config.json, if it has one."""
    path = os.path.expanduser(model.path)
    try:
        of_model = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # no such file: the tokenizer alone decides
        of_model = None
    ids = [tokenizer.eos_token_id, *(of_model if isinstance(of_model, list) else [of_model])]
    stops = tuple(sorted({token for token in ids if token is not None}))
    if not stops:
        raise ValueError(f"neither the tokenizer nor generation_config.json of {path} names an EOS token: no answer could end")
    return stops


def render(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, template_kwargs: dict[str, Any]) -> str:
    """The prompt as the model reads it, up to where its answer begins."""
    if isinstance(prompt, str):
        return prompt
    if tokenizer.chat_template is None:
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path} has no chat template, and the prompts are chat messages: take an "
            "instruct model's tokenizer (actor_rollout_ref.model.tokenizer_path), put a chat_template.jinja into the model's "
            "directory, or give prompts as plain strings"
        )
    text = tokenizer.apply_chat_template(prompt, **({"add_generation_prompt": True} | template_kwargs), tokenize=False)
    assert isinstance(text, str)
    return text


def encode(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], template_kwargs: dict[str, Any]) -> list[Encoded]:
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
