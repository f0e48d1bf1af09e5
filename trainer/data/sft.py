"""Prompt and answer pairs for supervised training."""

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from configs.schema.sft import SFTDataConfig
from trainer.data.chat import encode, token_ids, truncate
from trainer.data.files import Rows
from trainer.data.order import draw
from workers.batch import Batch


class SFTDataset:
    """Each row: the prompt (chat or text), the response and EOS; trained are the response and EOS alone."""

    def __init__(
        self,
        files: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        config: SFTDataConfig,
        *,
        max_samples: int,
        seed: int,
    ) -> None:
        """max_samples: use so many rows, drawn by ``seed`` if data.shuffle, else the first; -1: all.

        Raises ValueError, one line, for missing files, columns or rows, an empty prompt, and a row too long under truncation=error.
        """
        if tokenizer.eos_token_id is None:
            raise ValueError(f"the tokenizer of {tokenizer.name_or_path} has no EOS token: the model would never learn to end an answer")
        rows = Rows(files, [config.prompt_key, config.response_key])
        self._uids = draw(len(rows), max_samples, seed, config.shuffle)
        questions, answers = rows.column(config.prompt_key), rows.column(config.response_key)
        prompts = encode(tokenizer, [questions[uid] for uid in self._uids], config.apply_chat_template_kwargs)
        responses = token_ids(tokenizer, [answers[uid] for uid in self._uids], special=False)
        max_length = config.max_length
        self._ids: list[np.ndarray] = []
        self._masks: list[np.ndarray] = []
        cut = 0
        for uid, (_, prompt), response in zip(self._uids, prompts, responses, strict=True):
            if not len(prompt):
                raise ValueError(f"{rows.where(uid)}: the prompt is empty")
            ids = np.concatenate([prompt, response, [tokenizer.eos_token_id]])
            mask = np.arange(len(ids)) >= len(prompt)
            if len(ids) > max_length:
                if config.truncation == "error":
                    raise ValueError(
                        f"{rows.where(uid)}: {len(ids)} tokens with EOS, data.max_length is {max_length}: raise it, or set "
                        "data.truncation=left or right"
                    )
                cut += 1
                ids, mask = truncate(ids, max_length, config.truncation), truncate(mask, max_length, config.truncation)
                mask[0] = False  # nothing precedes the first token: it has no log-prob to train
            self._ids.append(ids)
            self._masks.append(mask)
        untrained = sum(not mask.any() for mask in self._masks)
        self.notices: tuple[str, ...] = ()
        if cut:
            self.notices = (
                f"{cut} of {len(self)} rows are longer than data.max_length={max_length} tokens and are cut "
                f"(data.truncation={config.truncation}); {untrained} of them keep no token of the response",
            )

    def __len__(self) -> int:
        return len(self._ids)

    def batch(self, indices: Sequence[int]) -> Batch:
        """B = len(indices) rows. tokens: input_ids int64, response_mask float32, (T,). rows: uid, the row in the files end to end."""
        ids = [self._ids[i] for i in indices]
        return Batch(
            lengths=torch.tensor([len(row) for row in ids], dtype=torch.int64),
            tokens={
                "input_ids": torch.from_numpy(np.concatenate(ids)),
                "response_mask": torch.from_numpy(np.concatenate([self._masks[i] for i in indices]).astype(np.float32)),
            },
            rows={"uid": torch.tensor([self._uids[i] for i in indices], dtype=torch.int64)},
        )
