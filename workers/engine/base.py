"""What every training engine is: a model with a head, sharded somehow, that runs forward and train steps.

An engine knows no algorithm: a loss reaches it as a function of outputs and a micro-batch.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from configs.schema.common import FSDPConfig, ModelConfig, Sharding
from workers.batch import Batch
from workers.engine.shared_prompts import Prompts
from workers.metric import Metrics
from workers.plan import MicroBatches

if TYPE_CHECKING:
    from peft import LoraConfig

Head = Literal["lm", "value", "reward"]
Weights = Literal["full", "merged", "adapter"]


@dataclass(frozen=True, slots=True)
class EngineMesh:
    """How the ranks of an engine hold the model and the data.

    dp_rank, dp_size: which share of the batch this rank gets. is_output_rank: it answers for its share.
    """

    rank: int
    world_size: int
    dp_rank: int
    dp_size: int
    is_output_rank: bool


class Loss(Protocol):
    """``needs`` names the outputs (see TrainEngine.forward). Called for a micro-batch of whole rows:

    outputs: {name: (T,), of a reward head (B,)} with gradient; micro_batch: the flat rows with their
    columns (``loss_weight`` is the engine's).
    Returns the loss of each token (T,), unweighted, and metrics. The engine adds sum(loss_weight * token_loss).
    """

    needs: frozenset[str]

    def __call__(self, outputs: dict[str, Tensor], micro_batch: Batch) -> tuple[Tensor, Metrics]: ...


@dataclass(frozen=True, slots=True)
class LossSpec:
    """How a loss travels to workers: where its factory is, and the frozen config the factory is called with.

    path: ``package.module:factory``. Resolved once per host; ``factory(config)`` is the Loss.
    """

    path: str
    config: Any

    def resolve(self) -> Loss:
        module, _, name = self.path.partition(":")
        factory: Callable[[Any], Loss] = getattr(importlib.import_module(module), name)
        return factory(self.config)


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """AdamW with warm-up and schedule. Steps are optimizer steps; ``total_steps`` is the length of the schedule.

    ema_decay: of a moving average of the parameters that goes along; None: none.
    """

    lr: float
    betas: tuple[float, float]
    weight_decay: float
    schedule: Literal["constant", "cosine", "linear", "wsd"]
    warmup_steps: int
    total_steps: int
    min_lr_ratio: float
    num_cycles: float
    clip_grad: float
    ema_decay: float | None = None


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """All an engine is built from. sharding: FSDP's or Megatron's, which says which engine it is. optimizer None: the model is
    never trained (a reference).
    """

    model: ModelConfig
    head: Head
    sharding: Sharding
    optimizer: OptimizerSpec | None
    device: Literal["cpu", "cuda"]
    seed: int

    @property
    def shares_prompts(self) -> bool:
        """Rows of a micro-batch that begin with the same prompt compute it once, if rows["prompt_length"] says where prompts end.
        FSDP's alone; tokens that Ulysses cuts over ranks do not."""
        return isinstance(self.sharding, FSDPConfig) and self.sharding.ulysses_sequence_parallel_size == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile:
    """A file on disk, in this directory. sha256: in hexadecimal, of what was written."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What one rank, or all ranks, wrote in a save. seconds: of writing. waited_for: why training waited for it, although it was
    to be in the background; None otherwise."""

    files: list[SavedFile]
    seconds: float
    waited_for: str | None = None

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    @classmethod
    def join(cls, parts: Sequence[Saved]) -> Saved:
        """What several ranks wrote at the same time."""
        reasons = [part.waited_for for part in parts if part.waited_for is not None]
        files = [file for part in parts for file in part.files]
        return cls(files=files, seconds=max(part.seconds for part in parts), waited_for=reasons[0] if reasons else None)


class TrainEngine(ABC):
    """Built with a head (lm, value, reward) and, if it is trained, an optimizer."""

    spec: EngineSpec
    mesh: EngineMesh
    adapter_config: LoraConfig | None = None
    """Of the model's LoRA adapter, by the names of its modules."""

    def prompts(self, batch: Batch) -> Prompts | None:
        """See EngineSpec.shares_prompts."""
        return Prompts.of(batch) if self.spec.shares_prompts else None

    @abstractmethod
    def forward(self, batch: Batch, plan: MicroBatches, outputs: set[str], *, adapter: bool = True) -> Batch | None:
        """Without gradient. ``batch`` is this rank's share: input_ids, response_mask, meta["temperature"]. adapter: with a LoRA
        adapter, if the model has one; False: the base model alone.

        outputs of a language head, where response_mask is set, 0 elsewhere: "log_probs", "entropy", "sum_pi_squared" (sum over
        the vocabulary of pi^2), "top_log_probs" ((T, 2), the two largest), "sampled_entropy" (the entropy where the batch's
        ``entropy_mask`` (T,), bool, is set and 0 elsewhere, for a fraction of what "entropy" costs), none of these three ever
        with a gradient, "all_log_probs" ((T, V), the one that costs such memory); of a value head "values", which adds
        rows["last_value"] too; of a reward head "scores", which are rows: one for each, at its last token.

        Returns a Batch of the same rows in the same order with these columns (float32, CPU),
        None on ranks that do not answer. Collective: every rank runs the same number of micro-batches.
        """

    @abstractmethod
    def train_step(self, batch: Batch, plan: MicroBatches, loss: Loss) -> Metrics:
        """One mini-batch is one optimizer step: gradients of sum(loss_weight * token_loss), summed over data-parallel
        ranks, never averaged; clipped; applied. ``batch`` is this rank's share and carries ``loss_weight`` (T,).
        Where the loss or the gradient of any rank is not finite, no rank applies it: parameters, moments and the schedule's
        count of steps stay as they are. Metrics: the loss's own, plus grad_norm (before clipping; NaN where the loss is not
        finite), loss, skipped_updates (1 if the update was not applied, else 0), and lr if it was.
        """

    @abstractmethod
    def export_weights(self, *, dtype: torch.dtype | None = None, kind: Weights = "merged") -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names, one full tensor at a time, of tied ones the first. Collective: every rank iterates to the end.

        kind: with a LoRA adapter, the weights with it added in (merged), without it (full), or its own alone (adapter), under
        peft's names for files. Without one, merged and full are the same.
        dtype: what they are copied into afterwards: those that have to be gathered may come in it already, if it is narrower.
        """

    @abstractmethod
    def live_weights(self) -> dict[str, Tensor] | None:
        """Hugging Face names to the very tensors that are trained, when nothing is sharded; else None."""

    @abstractmethod
    def move(
        self,
        *,
        params: Literal["device", "cpu"] | None = None,
        grads: Literal["device", "cpu"] | None = None,
        optimizer: Literal["device", "cpu"] | None = None,
    ) -> None:
        """Where each part lives; None leaves it. Gradients that leave the device are dropped: they are spent."""

    @abstractmethod
    def save(self, path: str, *, background: bool = False) -> Future[Saved]:
        """Model, optimizer and schedule, sharded, and what transformers needs beside the weights, into the directory ``path``.
        Of a model with a LoRA adapter nothing that is frozen; peft's adapter_config.json lies beside.

        Collective. The result is what this rank wrote, on disk, or OSError. background: it returns as soon as the state is
        copied to the host's memory, and threads write; the next save comes after that one's end. The bytes are the same.
        Without memory for the copies of all ranks (staging.shortage) all ranks write before they return.
        """

    @abstractmethod
    def load(self, path: str) -> None:
        """What save wrote, also from another number of ranks. Collective. Raises FileNotFoundError or ValueError."""

    @abstractmethod
    def export_hf(self, path: str) -> None:
        """A Hugging Face directory: safetensors and config; a LoRA adapter is merged. Collective; rank 0 writes."""

    @abstractmethod
    def flops(self, lengths: list[int], *, backward: bool) -> float:
        """Model FLOPs of a batch with these lengths: 2 or 6 a parameter and token, 4 if it is frozen, plus attention."""
