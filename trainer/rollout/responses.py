"""Batches of prompts and responses: rollout requests, decoded texts, joined sequences."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from trainer.data.dataset import Prompt
from workers.batch import Batch, repeat_rows


def prompt_batch(prompts: Sequence[Prompt], seeds: Sequence[int], greedy: torch.Tensor) -> Batch:
    """Rollout requests, one row per prompt. seeds: of each response. greedy: bool (B,), whether the response is greedy."""
    return Batch(
        lengths=torch.tensor([len(prompt.prompt_ids) for prompt in prompts], dtype=torch.int64),
        tokens={"input_ids": torch.from_numpy(np.fromiter(chain.from_iterable(p.prompt_ids for p in prompts), np.int64))},
        rows={"seed": torch.tensor(seeds), "greedy": greedy},
    )


def decode_responses(answers: Batch, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Responses as text (B), without stop token and special tokens, as verl decodes the text that it scores."""
    ids, ends = answers.tokens["input_ids"].numpy(), (answers.offsets[1:] - answers.rows["finished"]).tolist()
    written: list[Any] = [ids[start:end] for start, end in zip(answers.offsets.tolist(), ends, strict=False)]
    # NumPy arrays instead of lists: for a list, the tokenizer checks the type of every token.
    return tokenizer.batch_decode(written, skip_special_tokens=True)


def decode_sessions(rows: Batch, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Everything after the first prompt of each row as text (B), without special tokens: turns and what came between them."""
    ids, starts = rows.tokens["input_ids"].numpy(), (rows.offsets[:-1] + rows.rows["prompt_length"]).tolist()
    after: list[Any] = [ids[start:end] for start, end in zip(starts, rows.offsets[1:].tolist(), strict=True)]
    return tokenizer.batch_decode(after, skip_special_tokens=True)


def join_responses(questions: Batch, answers: Batch) -> Batch:
    """Concatenate each prompt with its response.

    Tokens (T,): input_ids, response_mask, rollout_log_probs (0 in prompts), weight_version (-1 in prompts).
    """
    whole = Batch(questions.lengths + answers.lengths)
    is_answer = whole.positions() >= repeat_rows(questions.lengths, whole.lengths)
    # masked_scatter fills the positions of a mask in order, which merges the two flat batches without a loop over rows.
    ids = torch.empty(len(is_answer), dtype=torch.int64).masked_scatter_(~is_answer, questions.tokens["input_ids"])
    log_probs = torch.zeros(len(is_answer))
    versions = torch.full((len(is_answer),), -1, dtype=torch.int32)
    return Batch(
        lengths=whole.lengths,
        tokens={
            "input_ids": ids.masked_scatter_(is_answer, answers.tokens["input_ids"]),
            "response_mask": is_answer.float(),
            "rollout_log_probs": log_probs.masked_scatter_(is_answer, answers.tokens["rollout_log_probs"]),
            "weight_version": versions.masked_scatter_(is_answer, answers.tokens["weight_version"]),
        },
        rows={"prompt_length": questions.lengths} | answers.rows,
    )
