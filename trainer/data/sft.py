"""What supervised training learns: pairs of prompt and answer, or conversations."""

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
    """Each row: the prompt (chat or text), the response and EOS; or a conversation. Trained are the answers and their ends."""

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
        """messages_key: column of conversations; None: prompt_key and response_key have pairs. A row without answer is left out.

        max_length: tokens of a row, all of it and EOS together; what is over is an error or cut (truncation).
        keys: what stands before max_length and truncation in the configuration.

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
            raise ValueError(f"{rows.where(0)}: no assistant's turn, nor in any other row: there is nothing to learn")
        self._ids: list[np.ndarray] = []
        self._masks: list[np.ndarray] = []
        cut = 0
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
                cut += 1
                ids, mask = truncate(ids, max_length, truncation), truncate(mask, max_length, truncation)
                mask[0] = False  # nothing precedes the first token: it has no log-prob to train
            self._ids.append(ids)
            self._masks.append(mask)
        untrained = sum(not mask.any() for mask in self._masks)
        self.notices = (
            *(
                [
                    f"{cut} of {len(self)} rows are longer than {keys}max_length={max_length} tokens and are cut "
                    f"({keys}truncation={truncation}); {untrained} of them keep no token to train on"
                ]
                if cut
                else []
            ),
            *_notices(turns, rows),
        )

    def __len__(self) -> int:
        return len(self._ids)

    def batch(self, indices: Sequence[int]) -> Batch:
        """B = len(indices) rows. tokens: input_ids int64, response_mask float32, (T,). rows: uid, the row in the files."""
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
    """What a user would want to know about the data, a line each."""
    silent = [row for row, found in enumerate(turns) if not found.n_turns]
    if silent:
        yield f"{len(silent)} of {len(turns)} rows have no assistant's turn and are left out ({rows.where(silent[0])} the first)"
    empty = [row for row, found in enumerate(turns) if found.n_empty]
    if empty:
        first = rows.where(empty[0])
        yield f"{len(empty)} of {len(turns)} rows have an empty answer: they teach its end alone ({first} the first)"
    still_open = sum(found.n_open for found in turns)
    if still_open:
        yield (
            f"{still_open} turns of the assistant that others follow are ended by no special token of the chat template: a model "
            "learns to stop at the last turn alone"
        )
