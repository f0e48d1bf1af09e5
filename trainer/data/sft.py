"""Prompt and answer pairs for supervised training."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from trainer.data.encoding import Truncation, encode, token_ids, truncate
from trainer.data.files import Rows
from workers.batch import Batch


class SFTDataset:
    """Each row: the prompt (chat or text), the response and EOS; trained are the response and EOS alone."""

    def __init__(
        self,
        files: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        *,
        prompt_key: str,
        response_key: str,
        max_length: int,
        truncation: Truncation,
        apply_chat_template_kwargs: dict[str, Any],
        keys: str = "data.",
    ) -> None:
        """max_length: tokens of a row, prompt, response and EOS together; what is over is an error or cut (truncation).
        keys: what stands before max_length and truncation in the configuration.

        Raises ValueError, one line, for missing files, columns or rows, for an empty prompt, and for a row that is too long.
        """
        if tokenizer.eos_token_id is None:
            raise ValueError(f"the tokenizer of {tokenizer.name_or_path} has no EOS token: a model could not learn to stop")
        rows = Rows(files, [prompt_key, response_key])
        prompts = encode(tokenizer, rows.column(prompt_key), apply_chat_template_kwargs)
        responses = token_ids(tokenizer, rows.column(response_key), special=False)
        self._ids: list[np.ndarray] = []
        self._masks: list[np.ndarray] = []
        cut = 0
        for row, ((_, prompt), response) in enumerate(zip(prompts, responses, strict=True)):
            if not len(prompt):
                raise ValueError(f"{rows.where(row)}: the prompt is empty")
            ids = np.concatenate([prompt, response, [tokenizer.eos_token_id]])
            mask = np.arange(len(ids)) >= len(prompt)
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
        self.notices: tuple[str, ...] = ()
        if cut:
            untrained = sum(not mask.any() for mask in self._masks)
            self.notices = (
                f"{cut} of {len(rows)} rows are longer than {keys}max_length={max_length} tokens and are cut "
                f"({keys}truncation={truncation}); {untrained} of them keep no token of the response",
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
            rows={"uid": torch.tensor(list(indices), dtype=torch.int64)},
        )
