"""Batches of prompts and responses: rollout requests, decoded texts, joined sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, starmap
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from trainer.agents.sessions.protocol import TurnPlace
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
    """Everything after the first prompt of each row as text (B), without special tokens: turns and what came between them.

    The text of a session's last row is that of all its rows: each begins with a context that leaves out or changes what was
    before, so the turns are taken from their rows, and what came between them from the messages.
    """
    ids, starts = rows.tokens["input_ids"].numpy(), (rows.offsets[:-1] + rows.rows["prompt_length"]).tolist()
    after: list[Any] = [ids[start:end] for start, end in zip(starts, rows.offsets[1:].tolist(), strict=True)]
    texts = tokenizer.batch_decode(after, skip_special_tokens=True)
    parts = rows.rows["part"].tolist()
    for last, (part, following) in enumerate(zip(parts, [*parts[1:], 0], strict=True)):
        if part == 0 or following != 0:
            continue
        session, begins = rows.objects["session"][last], rows.offsets[last - part : last + 1].tolist()
        places = [(begins[turn.part] + turn.start, begins[turn.part] + turn.end) for turn in starmap(TurnPlace, session["turns"])]
        sampled: list[Any] = [ids[start:end] for start, end in places]
        turns = tokenizer.batch_decode(sampled, skip_special_tokens=True)
        texts[last] = _joined(session["messages"], turns) or texts[last]
    return texts


def _joined(messages: Sequence[Mapping[str, Any]], turns: Sequence[str]) -> str | None:
    """The turns of a conversation with the messages between them, a line each; None if it has branches, with turns of others."""
    sampled = [i for i, message in enumerate(messages) if message.get("sampled")]
    if not sampled or len(sampled) != len(turns):
        return None
    own = dict(zip(sampled, turns, strict=True))
    # A loop may begin again with a prompt of its own, which is no part of the conversation.
    after = [i for i in range(sampled[0], len(messages)) if not messages[i].get("context")]
    return "\n".join(own[i] if i in own else _text(messages[i].get("content")) for i in after)


def _text(content: Any) -> str:
    """Text of a message's content: a text, None, or a list of parts."""
    parts = content if isinstance(content, list) else [content or ""]
    return "".join(part if isinstance(part, str) else str(part.get("text") or "") for part in parts)


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
