"""Supervised fine-tuning dataset: pairs of prompt and response, or conversations."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from trainer.data.encoding import Truncation, truncate
from trainer.data.files import Rows
from trainer.data.turns import TurnEncoder, Turns
from workers.batch import Batch


class SFTDataset:
    """Rows of prompt, response and EOS, or conversations; trained tokens are the responses and their end tokens."""

    def __init__(
        self,
        files: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        *,
        messages_key: str | None,
        prompt_key: str,
        response_key: str,
        max_length: int,
        truncation: Truncation,
        apply_chat_template_kwargs: dict[str, Any],
        keys: str = "data.",
    ) -> None:
        """messages_key: column of conversations; None: pairs in prompt_key and response_key. Rows without a response are dropped.

        max_length: maximum tokens of a row, EOS included; longer rows are truncated, or an error with truncation=error.
        keys: prefix of the keys max_length and truncation in the configuration, for messages.

        Raises ValueError, one line, for missing files, columns or rows, for an empty prompt, and for a row that is too long.
        """
        encoder = TurnEncoder(tokenizer, apply_chat_template_kwargs)
        if messages_key is not None:
            rows = Rows(files, [messages_key])
            turns = encoder.chats(rows, rows.column(messages_key))
        else:
            rows = Rows(files, [prompt_key, response_key])
            turns = encoder.pairs(rows, rows.column(prompt_key), rows.column(response_key))
        self._rows = [row for row, found in enumerate(turns) if found.n_turns]
        if not self._rows:
            raise ValueError(f"{rows.where(0)}: no assistant turn in this or any other row: there is nothing to train on")
        self._ids: list[np.ndarray] = []
        self._masks: list[np.ndarray] = []
        n_truncated = 0
        for row in self._rows:
            ids, mask = turns[row].ids, turns[row].trained
            if mask[0]:
                raise ValueError(f"{rows.where(row)}: the prompt is empty")
            if len(ids) > max_length:
                if truncation == "error":
                    raise ValueError(
                        f"{rows.where(row)}: {len(ids)} tokens with EOS, {keys}max_length is {max_length}: raise it, or set "
                        f"{keys}truncation=left or right"
                    )
                n_truncated += 1
                ids, mask = truncate(ids, max_length, truncation), truncate(mask, max_length, truncation)
                # Truncation from the left can put a trained token first, and nothing predicts the first token of a row.
                mask[0] = False
            self._ids.append(ids)
            self._masks.append(mask)
        untrained = sum(not mask.any() for mask in self._masks)
        self.notices = (
            *(
                [
                    f"{n_truncated} of {len(self)} rows are longer than {keys}max_length={max_length} tokens and are truncated "
                    f"({keys}truncation={truncation}); {untrained} of them keep no token to train on"
                ]
                if n_truncated
                else []
            ),
            *_notices(turns, rows),
        )

    def __len__(self) -> int:
        return len(self._ids)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Batch of B = len(indices) rows.

        tokens (T,): input_ids int64, response_mask float32. rows (B,): uid, the index of the row in the files.
        """
        ids = [self._ids[i] for i in indices]
        return Batch(
            lengths=torch.tensor([len(row) for row in ids], dtype=torch.int64),
            tokens={
                "input_ids": torch.from_numpy(np.concatenate(ids)),
                "response_mask": torch.from_numpy(np.concatenate([self._masks[i] for i in indices]).astype(np.float32)),
            },
            rows={"uid": torch.tensor([self._rows[i] for i in indices], dtype=torch.int64)},
        )


def _notices(turns: Sequence[Turns], rows: Rows) -> Iterator[str]:
    """Warnings about the data, one line each."""
    silent = [row for row, found in enumerate(turns) if not found.n_turns]
    if silent:
        yield f"{len(silent)} of {len(turns)} rows have no assistant turn and are left out (the first: {rows.where(silent[0])})"
    empty = [row for row, found in enumerate(turns) if found.n_empty]
    if empty:
        first = rows.where(empty[0])
        yield f"{len(empty)} of {len(turns)} rows have an empty response: only its end token is trained (the first: {first})"
    still_open = sum(found.n_open for found in turns)
    if still_open:
        yield (
            f"{still_open} assistant turns before the last are not ended by a special token of the chat template: the model "
            "learns to stop at the last turn only"
        )
