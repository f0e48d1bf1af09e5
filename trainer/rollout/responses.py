"""Batches of prompts and their responses: requests to a rollout, decoded texts, joined sequences."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from trainer.data.dataset import Prompt
from workers.batch import Batch


def ask(prompts: Sequence[Prompt], seeds: Sequence[int], greedy: torch.Tensor) -> Batch:
    """What a rollout is asked: one row a prompt, with its seed and whether the answer is greedy (bool (B,))."""
    return Batch(
        lengths=torch.tensor([len(prompt.prompt_ids) for prompt in prompts], dtype=torch.int64),
        tokens={"input_ids": torch.from_numpy(np.fromiter(chain.from_iterable(p.prompt_ids for p in prompts), np.int64))},
        rows={"seed": torch.tensor(seeds), "greedy": greedy},
    )


def texts_of(answers: Batch, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The responses (B) as text, without the token that ended one and without special tokens: as verl decodes what is scored."""
    ids, ends = answers.tokens["input_ids"].numpy(), (answers.offsets[1:] - answers.rows["finished"]).tolist()
    written: list[Any] = [ids[start:end] for start, end in zip(answers.offsets.tolist(), ends, strict=False)]
    return tokenizer.batch_decode(written, skip_special_tokens=True)  # of lists it would look at every token's type


def join(questions: Batch, answers: Batch) -> Batch:
    """Each prompt and its answer as one sequence, with the mask of what the policy wrote."""
    whole = Batch(questions.lengths + answers.lengths)
    is_answer = whole.positions() >= torch.repeat_interleave(questions.lengths, whole.lengths)
    ids = torch.empty(len(is_answer), dtype=torch.int64).masked_scatter_(~is_answer, questions.tokens["input_ids"])
    log_probs = torch.zeros(len(is_answer))
    return Batch(
        lengths=whole.lengths,
        tokens={
            "input_ids": ids.masked_scatter_(is_answer, answers.tokens["input_ids"]),
            "response_mask": is_answer.float(),
            "rollout_log_probs": log_probs.masked_scatter_(is_answer, answers.tokens["rollout_log_probs"]),
        },
        rows={"prompt_length": questions.lengths} | answers.rows,
    )
