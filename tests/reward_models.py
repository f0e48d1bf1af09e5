"""Reward models made by tests, and their scores by transformers alone, one conversation at a time."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
)

from data_preprocess import tiny_model

CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""A template that ends each turn and appends a newline."""


def make_reward_model(
    path: Path,
    *,
    seed: int,
    of_tokens: bool = False,
    own_words: bool = False,
    moments: tuple[float, float] | None = None,
    made: Sequence[str] = (),
) -> str:
    """A classifier with one label and random weights. own_words: bytes and CHAT, not the characters and the template of the quick
    start. moments: mean and standard deviation, written to the model's directory. made: arguments of the tiny model.
    """
    words = ["--bytes", "--architecture=llama"] if own_words else []
    tiny_model.main([f"--save_dir={path}", f"--seed={seed}", *words, *made])
    tokenizer = AutoTokenizer.from_pretrained(path)
    kind = AutoModelForTokenClassification if of_tokens else AutoModelForSequenceClassification
    torch.manual_seed(seed)
    model = kind.from_config(AutoConfig.from_pretrained(path, num_labels=1))
    torch.nn.init.normal_(model.score.weight, std=0.5)
    model.save_pretrained(path)
    if own_words:
        tokenizer.chat_template = CHAT
        tokenizer.save_pretrained(path)
    if moments is not None:
        (path / "reward_statistics.json").write_text(json.dumps(dict(zip(("mean", "std"), moments, strict=True))))
    return str(path)


def tokenizer_of(path: str) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path)
    return tokenizer


@torch.no_grad()
def plain_scores(path: str, rows: list[Tensor]) -> Tensor:
    """(B,): scores of the last token of each row, int64 (n,)."""
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    model.config.pad_token_id = None
    return torch.cat([model(input_ids=row[None]).logits[:, 0] for row in rows])


@torch.no_grad()
def plain_token_scores(path: str, rows: list[Tensor]) -> list[Tensor]:
    """Token scores (n,) of each row."""
    model = AutoModelForTokenClassification.from_pretrained(path).eval()
    return [model(input_ids=row[None]).logits[0, :, 0] for row in rows]
