"""Supervised fine-tuning: cross-entropy over response tokens."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from configs.schema.common import ModelConfig, is_ever
from configs.schema.supervised import SFTConfig
from trainer.algorithms.weights import token_weights
from trainer.cluster.remote import RemoteModel
from trainer.data.sft_dataset import SFTDataset
from workers.batch import Batch
from workers.engine.base import Head, LossSpec


class SFTTask:
    """Task of supervised fine-tuning. A unit of the data is a row."""

    head: Head = "lm"
    together = 1
    rows: tuple[str, ...] = ()
    loss = LossSpec("trainer.algorithms.losses.sft_loss:NextTokenLoss", None)

    def __init__(self, config: SFTConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self.config = config
        self.model: ModelConfig = config.model
        self._data = self._read(config.data.train_files, tokenizer)
        self._held_out = self._read(config.data.val_files, tokenizer) if is_ever(config.trainer.test_freq) else None
        self.notices = [*self._data.notices, *(self._held_out.notices if self._held_out is not None else ())]

    def _read(self, files: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> SFTDataset:
        data = self.config.data
        return SFTDataset(
            files,
            tokenizer,
            messages_key=data.messages_key,
            prompt_key=data.prompt_key,
            response_key=data.response_key,
            max_length=data.max_length,
            truncation=data.truncation,
            apply_chat_template_kwargs=data.apply_chat_template_kwargs,
        )

    def __len__(self) -> int:
        return len(self._data)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Global mini-batch with loss_weight (T,): a mean over all response tokens of the mini-batch."""
        batch = self._data.batch(indices).with_meta({"temperature": 1.0})
        weights = token_weights("token-mean", batch.tokens["response_mask"], batch.lengths, norm_length=1)
        return batch.with_tokens(loss_weight=weights)

    def validate(self, model: RemoteModel, step: int) -> dict[str, float]:
        """val/loss: mean cross-entropy per response token over all held-out rows."""
        assert self._held_out is not None
        batch = self._held_out.batch(range(len(self._held_out))).with_meta({"temperature": 1.0})
        log_probs = model.forward(batch, ["log_probs"]).tokens["log_probs"].double()
        return {"val/loss": float(-log_probs.sum() / batch.tokens["response_mask"].sum())}

    def extra_files(self, model: RemoteModel, step: int) -> dict[str, bytes]:
        """No files: weights, configuration and tokenizer are a complete model."""
        return {}
