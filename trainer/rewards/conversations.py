"""Token ids of a prompt and its response under another model's tokenizer and chat template."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from trainer.data.encoding import Message, Messages, encode, token_ids
from trainer.data.turns import TurnEncoder

NOT_RENDERED = ("reasoning_content", "sampled", "truncated", "status", "reward", "context")
"""Fields of a session's messages that a reward model does not read: thinking, and facts for people."""


class Conversations:
    """Encoder of conversations for a model whose tokenizer differs from the policy's, such as a reward model."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any]) -> None:
        """Raises ValueError for a tokenizer without an EOS token."""
        self.tokenizer = tokenizer
        self._encoder = TurnEncoder(tokenizer, template_kwargs)

    def ids(self, prompt: Messages, answer: str, *, finished: bool) -> np.ndarray:
        """Token ids of prompt and response, int64 (n,).

        Chat messages: the response is rendered as the next turn by the chat template, up to the token that ends the turn. Plain
        text: prompt, response, EOS. A truncated response (``finished`` false) has no end token.

        Raises ValueError, one line, for messages that the chat template rejects.
        """
        if isinstance(prompt, str):
            ((_, prompt_ids),) = encode(self.tokenizer, [prompt], {})
            (response_ids,) = token_ids(self.tokenizer, [answer], special=False)
            ids = np.append(np.concatenate([prompt_ids, response_ids]), self.tokenizer.eos_token_id).astype(np.int64)
        else:
            turns = [*prompt, {"role": "assistant", "content": answer}]
            ids = self._up_to_last_turn(turns)
        return ids if finished else ids[:-1]

    def ids_of_session(self, messages: list[Message], *, finished: bool) -> np.ndarray:
        """Token ids of a conversation with tools or an environment up to its last turn, int64 (n,), without thinking.

        Raises ValueError, one line, for messages that the chat template rejects, and if there is no turn.
        """
        ids = self._up_to_last_turn(rendered(messages))
        return ids if finished else ids[:-1]

    def _up_to_last_turn(self, messages: list[Message]) -> np.ndarray:
        row = self._encoder.chat("the conversation", messages, last=True)[-1]
        if not row.trained.any():
            raise ValueError("the conversation has no turn of the model")
        return row.up_to_the_end()


def rendered(messages: list[Message]) -> list[Message]:
    """Messages of a session with the fields that a reward model reads."""
    return [{name: value for name, value in message.items() if name not in NOT_RENDERED} for message in messages]


def with_template(tokenizer: PreTrainedTokenizerBase, path: str | None) -> PreTrainedTokenizerBase:
    """Set the tokenizer's chat template from the file ``path``, if given. Raises ValueError if the file does not exist."""
    if path is not None:
        file = Path(path).expanduser()
        if not file.is_file():
            raise ValueError(f"chat_template={path}: no such file")
        tokenizer.chat_template = file.read_text(encoding="utf-8")
    return tokenizer


def same_tokenizer(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Whether both tokenizers encode every conversation identically. False if unknown: tokenizers without a Rust backend."""
    return tokenizer_fingerprint(one) == tokenizer_fingerprint(other) != ""


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of everything that determines a conversation's tokens; "" if unknown: tokenizers without a Rust backend."""
    # Only the Rust backend serialises its rules. Names or vocabularies are not enough: two tokenizers with equal vocabularies may
    # differ in merges, normalisation or added tokens.
    if not tokenizer.is_fast:
        return ""
    rules = json.dumps((tokenizer_rules(tokenizer), tokenizer.eos_token_id, tokenizer.chat_template))
    return hashlib.blake2b(rules.encode(), digest_size=16).hexdigest()


def tokenizer_rules(tokenizer: PreTrainedTokenizerBase) -> str:
    """Serialised rules of a fast tokenizer, without truncation and padding."""
    # On a copy: truncation and padding are state left by the tokenizer's last call, and disabling them on the tokenizer itself
    # would race with calls of other threads.
    backend = type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    return backend.to_str()
