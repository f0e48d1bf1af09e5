"""Supervised fine-tuning dataset: pairs of prompt and response, or conversations."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from trainer.data.encoding import Truncation, check_token, truncate
from trainer.data.files import Rows
from trainer.data.turns import TurnEncoder, Turns
from workers.batch import Batch


class SFTDataset:
    """Pairs of prompt and response with EOS, or conversations; trained tokens are the responses and their end tokens.

    A unit of the data is a row of the files. It is one row of a batch, or several for a conversation that the chat template
    renders differently as it grows (see TurnEncoder.chat). divided: whether the chat template decides that, for at least one
    conversation of several assistant turns.
    """

    def __init__(
        self,
        files: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        *,
        messages_key: str | None,
        tools_key: str | None,
        prompt_key: str,
        response_key: str,
        max_length: int,
        truncation: Truncation,
        apply_chat_template_kwargs: dict[str, Any],
        keys: str = "data.",
    ) -> None:
        """messages_key: column of conversations; None: pairs in prompt_key and response_key. Rows without a response are dropped.

        tools_key: column with the tools of a conversation, function schemas or their JSON text; None: conversations have none.
        max_length: maximum tokens of a row, EOS included; longer rows are truncated, or an error with truncation=error.
        keys: prefix of the keys max_length and truncation in the configuration, for messages.

        Raises ValueError, one line, for missing files, columns or rows, for an empty prompt, and for a row that is too long.
        """
        encoder = TurnEncoder(tokenizer, apply_chat_template_kwargs)
        if messages_key is not None:
            rows = Rows(files, [messages_key, *([] if tools_key is None else [tools_key])])
            tools = None if tools_key is None else rows.column(tools_key)
            encoded = encoder.chats(rows, rows.column(messages_key), tools)
        else:
            rows = Rows(files, [prompt_key, response_key])
            pairs = encoder.pairs(rows, rows.column(prompt_key), rows.column(response_key))
            encoded = [[pair] for pair in pairs]
        self._rows = [row for row, parts in enumerate(encoded) if parts[0].n_turns]
        if not self._rows:
            raise ValueError(f"{rows.where(0)}: no assistant turn in this or any other row: there is nothing to train on")
        self.divided = not encoder.is_marked and any(sum(turns.n_turns for turns in parts) > 1 for parts in encoded)
        # Token ids and response mask of each row, by unit.
        self._units: list[list[tuple[np.ndarray, np.ndarray]]] = []
        self.whole: list[bool] = []
        """For each unit, whether truncation has left all its trained tokens."""
        n_truncated = 0
        largest = -1, 0
        for row in self._rows:
            unit, n_lost = [], 0
            for turns in encoded[row]:
                ids, mask = turns.ids, turns.trained
                if mask[0]:
                    raise ValueError(f"{rows.where(row)}: the prompt is empty")
                if len(ids) > max_length:
                    if truncation == "error":
                        raise ValueError(
                            f"{rows.where(row)}: {len(ids)} tokens with EOS, {keys}max_length is {max_length}: raise it, or set "
                            f"{keys}truncation=left or right"
                        )
                    n_truncated, before = n_truncated + 1, mask.sum()
                    ids, mask = truncate(ids, max_length, truncation), truncate(mask, max_length, truncation)
                    # Truncation from the left can put a trained token first, and nothing predicts the first token of a row.
                    mask[0] = False
                    n_lost += before - mask.sum()
                unit.append((ids, mask))
                largest = max(largest, (int(ids.max()), row))
            self._units.append(unit)
            self.whole.append(n_lost == 0)
        self._largest, self._with_largest = largest[0], rows.where(largest[1])
        masks = [mask for unit in self._units for _, mask in unit]
        untrained = sum(not mask.any() for mask in masks)
        self.notices = (
            *(
                [
                    f"{n_truncated} of {len(masks)} rows are longer than {keys}max_length={max_length} tokens and are truncated "
                    f"({keys}truncation={truncation}); {untrained} of them keep no token to train on"
                ]
                if n_truncated
                else []
            ),
            *_notices(encoded, rows),
            *(_without_tools(rows, messages_key) if messages_key is not None and tools_key is None else ()),
        )

    def __len__(self) -> int:
        return len(self._units)

    def check_tokens(self, vocab_size: int, key: str) -> None:
        """Raise ValueError, naming a row, if a token is outside the vocabulary of the model that ``key`` configures."""
        check_token(self._with_largest, "it", self._largest, vocab_size, key)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Batch of these units, in order: B = len(indices) rows, or more for conversations of several rows.

        tokens (T,): input_ids int64, response_mask float32. rows (B,): uid, the index of the unit in the files.
        """
        ids, masks = zip(*(part for i in indices for part in self._units[i]), strict=True)
        uids = [self._rows[i] for i in indices for _ in self._units[i]]
        return Batch(
            lengths=torch.tensor([len(row) for row in ids], dtype=torch.int64),
            tokens={
                "input_ids": torch.from_numpy(np.concatenate(ids)),
                "response_mask": torch.from_numpy(np.concatenate(masks).astype(np.float32)),
            },
            rows={"uid": torch.tensor(uids, dtype=torch.int64)},
        )


def _notices(encoded: Sequence[Sequence[Turns]], rows: Rows) -> Iterator[str]:
    """Warnings about the data, one line each."""
    silent = [row for row, parts in enumerate(encoded) if not parts[0].n_turns]
    if silent:
        yield f"{len(silent)} of {len(encoded)} rows have no assistant turn and are left out (the first: {rows.where(silent[0])})"
    several = [row for row, parts in enumerate(encoded) if len(parts) > 1]
    if several:
        n_rows = sum(len(encoded[row]) for row in several)
        n_tokens, n_before = (sum(len(part.ids) for row in several for part in encoded[row][first:]) for first in (0, -1))
        yield (
            f"{len(several)} of {len(encoded)} conversations are {n_rows} rows of training, one for each place where the chat "
            f"template renders an earlier turn differently: {n_tokens:,} tokens instead of about {n_before:,} (the first: "
            f"{rows.where(several[0])})"
        )
    empty = [row for row, parts in enumerate(encoded) if any(turns.n_empty for turns in parts)]
    if empty:
        first = rows.where(empty[0])
        yield f"{len(empty)} of {len(encoded)} rows have an empty response: only its end token is trained (the first: {first})"
    still_open = sum(turns.n_open for parts in encoded for turns in parts)
    if still_open:
        yield (
            f"{still_open} assistant turns before the last are not ended by a special token of the chat template: the model "
            "learns to stop at the last turn only"
        )


def _without_tools(rows: Rows, messages_key: str) -> Iterator[str]:
    """Warning about calls of tools that the prompts do not describe."""
    chats = rows.column(messages_key)
    called = [row for row, chat in enumerate(chats) if any(message.get("tool_calls") for message in chat)]
    if called:
        yield (
            f"{len(called)} of {len(chats)} conversations have tool calls, and their prompts have no tools, which those of RL "
            f"have (the first: {rows.where(called[0])}); data.tools_key names their column"
        )
