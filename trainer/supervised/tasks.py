"""Tasks of the supervised loop.

SFT: fine-tuning, cross-entropy over response tokens. RewardModelTask: reward-model training on preference pairs, the chosen
response should score higher than the rejected one. DPOTask, of policies on such pairs, is in dpo_task.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from configs.schema.common import ModelConfig, is_ever
from configs.schema.supervised import DPOConfig, RewardModelConfig, SFTConfig
from trainer.algorithms.losses.preference_losses import CHOSEN, accuracy, calibration_error, pair_losses
from trainer.algorithms.segments import group_ids, sum_by
from trainer.algorithms.weights import token_weights
from trainer.cluster.remote import RemoteModel
from trainer.data.order import DataOrder
from trainer.data.preference_dataset import PreferenceDataset
from trainer.data.sft_dataset import SFTDataset
from trainer.data.template_check import OF_TEXT, check_template
from trainer.rewards.models.reward_models import STATISTICS
from workers.batch import Batch
from workers.engine.base import Head, LossSpec
from workers.engine.hf.hf_model import vocab_size


class Task(Protocol):
    """A supervised task: data, loss, validation. By default it prepares nothing, trains all steps and has no further files.

    unit: row column whose values number the units of the data; rows of a unit stay in one micro-batch. None: a unit is a row.
    rows: row columns that the loss reads. notices: warnings about the data.
    """

    head: Head
    unit: str | None
    rows: tuple[str, ...]
    model: ModelConfig
    loss: LossSpec
    notices: list[str]

    def __len__(self) -> int:
        """Number of units of the training data; data.train_batch_size counts the same units."""

    def prepare(self, model: RemoteModel, order: DataOrder, steps: range) -> None:
        """Compute what needs the initial weights, before a checkpoint is loaded. steps: those that remain, counted from 0."""

    def batch(self, indices: Sequence[int]) -> Batch:
        """Global mini-batch of these units, with loss_weight (T,)."""

    def validate(self, model: RemoteModel, step: int) -> dict[str, float]:
        """Metrics over the held-out data, prefix val/."""

    def is_done(self, metrics: Mapping[str, float]) -> bool:
        """Whether training ends after the step of these metrics, before its last step."""
        return False

    def extra_files(self, model: RemoteModel, step: int) -> dict[str, bytes]:
        """Files to save with the model after ``step``: {name: content}."""
        return {}


class SFTTask(Task):
    """Task of supervised fine-tuning. A unit of the data is a row of the files: a pair or a conversation."""

    head: Head = "lm"
    unit: str | None = None
    rows: tuple[str, ...] = ()
    loss = LossSpec("trainer.algorithms.losses.sft_loss:NextTokenLoss", None)

    def __init__(self, config: SFTConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self.config = config
        self.model: ModelConfig = config.model
        self._data = self._read(config.data.train_files, tokenizer)
        self._held_out = self._read(config.data.val_files, tokenizer) if is_ever(config.trainer.test_freq) else None
        data = [self._data] if self._held_out is None else [self._data, self._held_out]
        self.notices = [notice for part in data for notice in part.notices]
        if any(part.divided for part in data):
            report = check_template(tokenizer, config.data.apply_chat_template_kwargs, OF_TEXT)
            note = report.note("A conversation is divided into rows there: each turn is trained after the prompt of generation")
            self.notices[:0] = [] if note is None else [note]

    def _read(self, files: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> SFTDataset:
        data = self.config.data
        found = SFTDataset(
            files,
            tokenizer,
            messages_key=data.messages_key,
            tools_key=data.tools_key,
            prompt_key=data.prompt_key,
            response_key=data.response_key,
            max_length=data.max_length,
            truncation=data.truncation,
            apply_chat_template_kwargs=data.apply_chat_template_kwargs,
        )
        found.check_tokens(vocab_size(self.model), "model")
        return found

    def __len__(self) -> int:
        return len(self._data)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Global mini-batch with loss_weight (T,): a mean over all response tokens of the mini-batch."""
        batch = self._data.batch(indices).with_meta({"temperature": 1.0})
        weights = token_weights("token-mean", batch.tokens["response_mask"], batch.lengths, norm_length=1)
        return batch.with_tokens(loss_weight=weights)

    def validate(self, model: RemoteModel, step: int) -> dict[str, float]:
        """val/loss: mean cross-entropy per response token over all held-out rows. val/probability: mean of the probability that
        the model samples exactly the given response (all turns of it), over the units whose response is not truncated; NaN if
        all are.
        """
        assert self._held_out is not None
        batch = self._held_out.batch(range(len(self._held_out))).with_meta({"temperature": 1.0})
        log_probs = model.forward(batch, ["log_probs"]).tokens["log_probs"].double()
        unit, size = group_ids(batch.rows["uid"])
        probabilities = sum_by(log_probs, unit[batch.segment_ids()], len(size)).exp()
        return {
            "val/loss": float(-log_probs.sum() / batch.tokens["response_mask"].sum()),
            "val/probability": float(probabilities[torch.tensor(self._held_out.whole)].mean()),
        }

    def is_done(self, metrics: Mapping[str, float]) -> bool:
        """Whether the held-out responses are as probable as trainer.stop_at_probability asks."""
        bound = self.config.trainer.stop_at_probability
        return bound is not None and metrics.get("val/probability", 0.0) >= bound


PAIRS_PER_FORWARD = 1024  # pairs per forward call; bounds the size of a batch sent to the workers


class RewardModelTask(Task):
    """Task of reward-model training. A unit of the data is a pair, two adjacent rows: chosen, rejected."""

    head: Head = "reward"
    unit: str | None = "uid"
    rows: tuple[str, ...] = ("uid", "side", "margin")

    def __init__(self, config: RewardModelConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self.config = config
        self.model = with_padding(config.model, tokenizer)
        self.loss = LossSpec("trainer.algorithms.losses.preference_losses:BradleyTerryLoss", config.loss)
        margin_key = config.data.margin_key
        self._data = read_pairs(config, config.data.train_files, tokenizer, margin_key)
        self._held_out = read_pairs(config, config.data.val_files, tokenizer, margin_key) if config.data.val_files else None
        self.notices = [*self._data.notices, *(self._held_out.notices if self._held_out is not None else ())]
        # (step, scores): validation and a checkpoint after the same step need the same scores.
        self._scored: tuple[int, Tensor] | None = None

    def __len__(self) -> int:
        return len(self._data)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Global mini-batch of P pairs. loss_weight: a mean over the pairs."""
        return weighted_by_pair(self._data.batch(indices))

    def validate(self, model: RemoteModel, step: int) -> dict[str, float]:
        """Loss, accuracy, calibration error and mean score difference over held-out pairs; mean and deviation of their scores."""
        assert self._held_out is not None
        scores = self._scores(model, step, self._held_out)
        chosen, rejected = scores.unbind(1)
        return {
            "val/loss": float(pair_losses(chosen, rejected, self._held_out.margins.double(), self.config.loss).mean()),
            "val/accuracy": float(accuracy(chosen - rejected).mean()),
            "val/calibration_error": calibration_error(chosen - rejected),
            "val/score_difference": float((chosen - rejected).mean()),
            "val/score_mean": float(scores.mean()),
            "val/score_std": float(scores.std(correction=0)),
        }

    def extra_files(self, model: RemoteModel, step: int) -> dict[str, bytes]:
        """Score statistics for reward normalisation: mean and deviation over held-out responses, else over the training data."""
        data = self._data if self._held_out is None else self._held_out
        scores = self._scores(model, step, data)
        of = "train" if self._held_out is None else "validation"
        statistics = {"mean": float(scores.mean()), "std": float(scores.std(correction=0)), "answers": scores.numel(), "data": of}
        return {STATISTICS: json.dumps(statistics, indent=2).encode()}

    def _scores(self, model: RemoteModel, step: int, data: PreferenceDataset) -> Tensor:
        """Scores of chosen and rejected responses, float64 (P, 2). The scores of the last ``step`` are cached."""
        if self._scored is None or self._scored[0] != step:
            found = []
            for pairs in chunks_of_pairs(len(data)):
                found.append(model.forward(data.batch(pairs), ["scores"]).rows["scores"].double().view(-1, 2))
            self._scored = step, torch.cat(found)
        return self._scored[1]


def read_pairs(
    config: RewardModelConfig | DPOConfig, files: Sequence[str], tokenizer: PreTrainedTokenizerBase, margin_key: str | None
) -> PreferenceDataset:
    """The pairs of these files, as the configuration reads them. Raises ValueError for tokens that the model does not have."""
    data = config.data
    found = PreferenceDataset(
        files,
        tokenizer,
        prompt_key=data.prompt_key,
        chosen_key=data.chosen_key,
        rejected_key=data.rejected_key,
        margin_key=margin_key,
        max_length=data.max_length,
        truncation=data.truncation,
        apply_chat_template_kwargs=data.apply_chat_template_kwargs,
    )
    found.check_tokens(vocab_size(config.model), "model")
    return found


def chunks_of_pairs(n: int) -> list[range]:
    """Consecutive pairs of ``n``, PAIRS_PER_FORWARD at a time."""
    return [range(start, min(start + PAIRS_PER_FORWARD, n)) for start in range(0, n, PAIRS_PER_FORWARD)]


def weighted_by_pair(batch: Batch) -> Batch:
    """A batch of P pairs with loss_weight: 1 / P at the last token of each chosen row, where losses of pairs stand."""
    weight = torch.zeros(batch.total_tokens)
    weight[(batch.offsets[1:] - 1)[batch.rows["side"] == CHOSEN]] = 2 / len(batch)
    return batch.with_tokens(loss_weight=weight)


def with_padding(model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> ModelConfig:
    """Set pad_token_id in the model's configuration, so that transformers can score batches with the exported reward model.

    Unchanged if the padding token is missing, equals EOS or is outside the vocabulary.
    """
    # The score is read at the last token that is not padding: with padding equal to EOS, the EOS of a response would be skipped.
    pad = tokenizer.pad_token_id
    if pad is None or pad == tokenizer.eos_token_id or pad >= vocab_size(model):
        return model
    return replace(model, override_config={"pad_token_id": pad} | model.override_config)
