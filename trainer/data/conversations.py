"""A prompt and an answer to it, as the tokens that another model reads."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from trainer.data.encoding import Messages, encode, token_ids
from trainer.data.turns import TurnEncoder


class Conversations:
    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any]) -> None:
        """Raises ValueError for a tokenizer without EOS."""
        self.tokenizer = tokenizer
        self._encoder = TurnEncoder(tokenizer, template_kwargs)

    def ids(self, prompt: Messages, answer: str, *, finished: bool) -> np.ndarray:
        """int64 (n,): chat messages and the answer as their next turn by the chat template, up to the token that ends the turn; a
        text and the answer behind it, with EOS. An answer that was cut has no such token.

        Raises ValueError, one line, for what the chat template refuses.
        """
        if isinstance(prompt, str):
            ((_, before),) = encode(self.tokenizer, [prompt], {})
            (said,) = token_ids(self.tokenizer, [answer], special=False)
            ids = np.append(np.concatenate([before, said]), self.tokenizer.eos_token_id).astype(np.int64)
        else:
            turns = [*prompt, {"role": "assistant", "content": answer}]
            ids = self._encoder.chat("the conversation", turns).up_to_the_end()
        return ids if finished else ids[:-1]


def with_template(tokenizer: PreTrainedTokenizerBase, path: str | None) -> PreTrainedTokenizerBase:
    """The tokenizer, with the chat template in the file if one is named. Raises ValueError if it is not there."""
    if path is not None:
        file = Path(path).expanduser()
        if not file.is_file():
            raise ValueError(f"chat_template={path}: no such file")
        tokenizer.chat_template = file.read_text(encoding="utf-8")
    return tokenizer


def same_words(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Both make the same tokens of any conversation. False where that cannot be told: tokenizers of plain Python."""
    return words_of(one) == words_of(other) != ""


def words_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of all that decides about a conversation's tokens; "" where that cannot be told: of a tokenizer of plain Python."""
    if not tokenizer.is_fast:
        return ""
    rules = json.dumps((rules_of(tokenizer), tokenizer.eos_token_id, tokenizer.chat_template))
    return hashlib.blake2b(rules.encode(), digest_size=16).hexdigest()


def rules_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """All that decides about tokens; truncation and padding are set by whoever called it last."""
    backend = type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    return backend.to_str()
