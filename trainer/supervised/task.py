"""What supervised training is of: everything in which fine-tuning and reward models differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from configs.schema.common import ModelConfig
from trainer.cluster.remote import RemoteModel
from workers.batch import Batch
from workers.engine.base import Head, LossSpec


class Task(Protocol):
    """together: so many rows, one behind the other in a batch, are a unit of the data, and in the same micro-batch. rows: columns
    that the loss reads. notices: lines for the user about the data.
    """

    head: Head
    together: int
    rows: tuple[str, ...]
    model: ModelConfig
    loss: LossSpec
    notices: list[str]

    def __len__(self) -> int:
        """Units of the training data, which data.train_batch_size counts."""

    def batch(self, indices: Sequence[int]) -> Batch:
        """These units as a global mini-batch; it carries loss_weight (T,)."""

    def validate(self, model: RemoteModel, step: int) -> dict[str, float]:
        """Metrics of the held-out data, under val/."""

    def extra_files(self, model: RemoteModel, step: int) -> dict[str, bytes]:
        """Files that go with the model as it is after ``step``, by their names."""
