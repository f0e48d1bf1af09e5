"""Preference dataset: a chosen and a rejected response to each prompt."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trainer.algorithms.losses.preference_losses import CHOSEN, REJECTED
from trainer.data.encoding import Truncation, check_token, truncate
from trainer.data.files import Rows
from trainer.data.turns import TurnEncoder, Turns
from workers.batch import Batch
from workers.prefixes import common_length

LARGEST = torch.finfo(torch.float32).max


class PreferenceDataset:
    """Pairs as two rows: prompt with chosen response and prompt with rejected response, each up to the response's end token."""

    def __init__(
        self,
        files: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        *,
        prompt_key: str | None,
        chosen_key: str,
        rejected_key: str,
        margin_key: str | None,
        max_length: int,
        truncation: Truncation,
        apply_chat_template_kwargs: dict[str, Any],
    ) -> None:
        """prompt_key: column of prompts; None: the response columns hold complete conversations or texts. margin_key: column of
        required score differences; None: 0. max_length: maximum tokens of a row, prompt included.

        Raises ValueError, one line, for missing files or columns, for values that are neither text nor conversation, and for rows
        that are too long with truncation=error.
        """
        keys = [chosen_key, rejected_key, *(key for key in (prompt_key, margin_key) if key is not None)]
        self._rows = rows = Rows(files, keys)
        self._encoder = TurnEncoder(tokenizer, apply_chat_template_kwargs)
        prompts = rows.column(prompt_key) if prompt_key is not None else [None] * len(rows)
        sides = {side: self._side(prompts, key) for side, key in ((CHOSEN, chosen_key), (REJECTED, rejected_key))}
        # The score is read at the last token. Whitespace that a template writes after the end token would shift it to a token
        # that no response of the policy ever ends with.
        self._sides = {side: [turns.up_to_the_end() for turns in column] for side, column in sides.items()}
        self._starts = {side: [turns.last_turn() for turns in column] for side, column in sides.items()}
        if prompt_key is None and isinstance(rows.column(chosen_key)[0], str):
            # The prompt is not marked in whole texts: it is what they have in common.
            same = [common_length(*pair) for pair in zip(*self._sides.values(), strict=True)]
            for side, column in self._sides.items():
                self._starts[side] = [max(1, min(n, len(ids) - 1)) for n, ids in zip(same, column, strict=True)]
        margins = rows.column(margin_key) if margin_key is not None else [0.0] * len(rows)
        for row, margin in enumerate(margins):
            # Not of NaN either. An integer of more digits than a float is compared without a conversion.
            if not isinstance(margin, int | float) or not -LARGEST <= margin <= LARGEST:
                raise ValueError(f"{rows.where(row)}: {margin_key} is {margin!r:.60}; must be a finite number within float32")
        self.margins = torch.tensor(margins, dtype=torch.float32)
        # Counted before the truncation: two long responses that share a prefix are no duplicates in the data.
        equal = sum(np.array_equal(*pair) for pair in zip(*self._sides.values(), strict=True))
        notice = f"{equal} of {len(rows)} pairs have identical chosen and rejected responses, which give no gradient"
        self.notices = [notice] if equal else []
        self._truncate(max_length, truncation)

    def _side(self, prompts: Sequence[Any], key: str) -> list[Turns]:
        """Prompt and response for every row of the column ``key``."""
        rows, answers = self._rows, self._rows.column(key)
        if isinstance(next((answer for answer in answers if answer is not None), None), str):
            texts = [prompt if prompt is not None else "" for prompt in prompts]
            return self._encoder.pairs(rows, texts, answers)
        chats = []
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            if not isinstance(answer, list) or not isinstance(prompt, list | None):
                raise ValueError(f"{rows.where(row)}: {key} is a conversation, so the prompt must be one too, or null")
            chats.append([*(prompt or []), *answer])
        # Earlier turns are context: only the last one has to follow its prompt.
        found = [turns[-1] for turns in self._encoder.chats(rows, chats, last=True)]
        for row, (chat, turns) in enumerate(zip(chats, found, strict=True)):
            if chat[-1]["role"] != "assistant" or not turns.trained.any():
                raise ValueError(f"{rows.where(row)}: {key} does not end with an assistant turn: there is no response to score")
        return found

    def _truncate(self, max_length: int, truncation: Truncation) -> None:
        """Truncate rows over max_length tokens and add a notice. Raises ValueError with truncation=error."""
        n_truncated = n_lost = 0
        for side, all_ids in self._sides.items():
            for row, ids in enumerate(all_ids):
                if len(ids) <= max_length:
                    continue
                if truncation == "error":
                    name = {CHOSEN: "chosen", REJECTED: "rejected"}[side]
                    raise ValueError(
                        f"{self._rows.where(row)}: {len(ids)} tokens with the {name} response, data.max_length is {max_length}: "
                        "raise it, or set data.truncation=left or right"
                    )
                all_ids[row] = truncate(ids, max_length, truncation)
                n_truncated += 1
                n_lost += truncation == "right" and self._starts[side][row] >= max_length
                if truncation == "left":
                    # Nothing predicts the first token of a row.
                    self._starts[side][row] = max(1, self._starts[side][row] - len(ids) + max_length)
        if n_truncated:
            self.notices.append(
                f"{n_truncated} of {2 * len(self)} responses are longer than data.max_length={max_length} tokens and are "
                f"truncated (data.truncation={truncation})"
                + (f"; {n_lost} of them keep no token of the response" if n_lost else "")
            )

    def __len__(self) -> int:
        return len(self.margins)

    def check_tokens(self, vocab_size: int, key: str) -> None:
        """Raise ValueError, naming a row, if a token is outside the vocabulary of the model that ``key`` configures."""
        largest, row = max((int(ids.max()), row) for column in self._sides.values() for row, ids in enumerate(column))
        check_token(self._rows.where(row), "it", largest, vocab_size, key)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Batch of P = len(indices) pairs, B = 2 P rows: each chosen response followed by its rejected one.

        tokens (T,): input_ids int64; response_mask float32, 1 in the response's last turn, its end token included. rows (B,):
        uid, the index of the pair in the files; side; margin.
        """
        places = [(side, i) for i in indices for side in (CHOSEN, REJECTED)]
        ids = [self._sides[side][i] for side, i in places]
        masks = [np.arange(len(row)) >= self._starts[side][i] for row, (side, i) in zip(ids, places, strict=True)]
        pairs = torch.tensor(list(indices), dtype=torch.int64)
        return Batch(
            lengths=torch.tensor([len(row) for row in ids], dtype=torch.int64),
            tokens={
                "input_ids": torch.from_numpy(np.concatenate(ids)),
                "response_mask": torch.from_numpy(np.concatenate(masks).astype(np.float32)),
            },
            rows={
                "uid": pairs.repeat_interleave(2),
                "side": torch.tensor([CHOSEN, REJECTED]).repeat(len(pairs)),
                "margin": self.margins[pairs].repeat_interleave(2),
            },
        )

    def prompt_lengths(self, indices: Sequence[int]) -> Tensor:
        """Number of tokens before the responses that the rows of a pair have in common, int64 (B,), for the rows of ``batch``."""
        found = []
        for i in indices:
            pair = [self._sides[side][i] for side in (CHOSEN, REJECTED)]
            found.append(min(common_length(*pair), *(self._starts[side][i] for side in (CHOSEN, REJECTED))))
        return torch.tensor(found, dtype=torch.int64).repeat_interleave(2)
