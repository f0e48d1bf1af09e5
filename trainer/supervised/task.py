"""Interface of a supervised task: everything in which fine-tuning and reward models differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from configs.schema.common import ModelConfig
from trainer.cluster.remote import RemoteModel
from workers.batch import Batch
from workers.engine.base import Head, LossSpec


class Task(Protocol):
    """A supervised task: data, loss, validation.

    together: number of consecutive rows that form a unit of the data and stay in one micro-batch. rows: row columns that the loss
    reads. notices: warnings about the data.
    """

    head: Head
    together: int
    rows: tuple[str, ...]
    model: ModelConfig
    loss: LossSpec
    notices: list[str]

    def __len__(self) -> int:
        """Number of units of the training data; data.train_batch_size counts the same units."""

    def batch(self, indices: Sequence[int]) -> Batch:
        """Global mini-batch of these units, with loss_weight (T,)."""

    def validate(self, model: RemoteModel, step: int) -> dict[str, float]:
        """Metrics over the held-out data, prefix val/."""

    def extra_files(self, model: RemoteModel, step: int) -> dict[str, bytes]:
        """Files to save with the model after ``step``: {name: content}."""
