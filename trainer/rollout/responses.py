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
from workers.roles.rollout_role import decode_responses


def prompt_batch(prompts: Sequence[Prompt], seeds: Sequence[int], greedy: torch.Tensor) -> Batch:
    """Rollout requests, one row per prompt. seeds: of each response. greedy: bool (B,), whether the response is greedy."""
    return Batch(
        lengths=torch.tensor([len(prompt.prompt_ids) for prompt in prompts], dtype=torch.int64),
        tokens={"input_ids": torch.from_numpy(np.fromiter(chain.from_iterable(p.prompt_ids for p in prompts), np.int64))},
        rows={"seed": torch.tensor(seeds), "greedy": greedy},
    )


def texts_of(answers: Batch, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Responses as text (B), see decode_responses. Replicas that decode have sent them."""
    return answers.objects["response"] if "response" in answers.objects else decode_responses(answers, tokenizer)


def decode_sessions(rows: Batch, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Everything after the first prompt of each row as text (B), without special tokens: turns and what came between them."""
    ids, starts = rows.tokens["input_ids"].numpy(), (rows.offsets[:-1] + rows.rows["prompt_length"]).tolist()
    after: list[Any] = [ids[start:end] for start, end in zip(starts, rows.offsets[1:].tolist(), strict=True)]
    return tokenizer.batch_decode(after, skip_special_tokens=True)


def join_responses(questions: Batch, answers: Batch) -> Batch:
    """Concatenate each prompt with its response.

    Tokens (T,): input_ids, response_mask, rollout_log_probs (0 in prompts), weight_version (-1 in prompts).
    """
    n, total = len(questions), questions.total_tokens
    columns = {"rollout_log_probs": torch.zeros(total), "weight_version": torch.full((total,), -1, dtype=torch.int32)}
    asked = questions.only(tokens=["input_ids"]).with_tokens(**columns)
    # As rows of their own, alternating: the columns of both are then those of the sequences.
    turns = Batch.concat([asked, answers.only(tokens=[*asked.tokens])], torch.arange(2 * n).view(2, n).T.flatten())
    mask = repeat_rows(torch.tensor([0.0, 1.0]).repeat(n), turns.lengths)
    tokens = {"input_ids": turns.tokens["input_ids"], "response_mask": mask} | turns.tokens
    return Batch(questions.lengths + answers.lengths, tokens, {"prompt_length": questions.lengths} | answers.rows)


def in_order(parts: Sequence[Batch]) -> Batch:
    """Concatenate batches, with their rows in the order of rows["id"]."""
    return Batch.concat(parts, torch.cat([part.rows["id"] for part in parts]).argsort(stable=True))
