"""Interface of a training engine: a sharded model with a head that runs forward and train steps.

An engine knows no algorithm: a loss is passed to it as a function of outputs and a micro-batch.
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
from workers.metric import Metrics
from workers.plan import MicroBatches
from workers.prefixes import Chain, chains_by_tokens

if TYPE_CHECKING:
    from peft import LoraConfig

Head = Literal["lm", "value", "reward"]
Weights = Literal["full", "merged", "adapter"]


@dataclass(frozen=True, slots=True)
class EngineMesh:
    """Position of a rank in an engine's parallel layout.

    dp_rank, dp_size: the data-parallel shard of the batch that this rank computes. Ranks of one model replica (tensor, pipeline,
    context or sequence parallel) have the same dp_rank; is_output_rank: the one of them that returns the results.
    """

    rank: int
    world_size: int
    dp_rank: int
    dp_size: int
    is_output_rank: bool


class Loss(Protocol):
    """Loss of a micro-batch of complete rows. ``needs``: the outputs it reads, see TrainEngine.forward.

    outputs: {name: (T,), or (B,) for a reward head} with gradient. micro_batch: the flat rows with their columns; ``loss_weight``
    is applied by the engine, not by the loss.
    Returns the unweighted loss of each token (T,) and metrics. The engine adds up sum(loss_weight * token_loss).
    """

    needs: frozenset[str]

    def __call__(self, outputs: dict[str, Tensor], micro_batch: Batch) -> tuple[Tensor, Metrics]: ...


@dataclass(frozen=True, slots=True)
class LossSpec:
    """Serializable reference to a loss: the import path of its factory and the frozen config passed to it.

    path: ``package.module:factory``. Resolved in the worker, once; ``factory(config)`` is the Loss.
    """

    path: str
    config: Any

    def resolve(self) -> Loss:
        """Import the factory and call it. Raises what the import or the factory raises."""
        module, _, name = self.path.partition(":")
        factory: Callable[[Any], Loss] = getattr(importlib.import_module(module), name)
        return factory(self.config)


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """AdamW with warm-up and schedule; all counts are optimizer steps. total_steps: length of the schedule.

    ema_decay: decay of an exponential moving average of the parameters; None: no average is kept.
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
    """Everything an engine is built from.

    sharding: of FSDP or of Megatron; its type selects the engine. optimizer: None for a model that is never trained (a
    reference).
    """

    model: ModelConfig
    head: Head
    sharding: Sharding
    optimizer: OptimizerSpec | None
    device: Literal["cpu", "cuda"]
    seed: int

    @property
    def shares_prefixes(self) -> bool:
        """Whether rows of a micro-batch compute a common prefix once, see workers/prefixes.py. Only with FSDP."""
        return isinstance(self.sharding, FSDPConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile:
    """A file of a checkpoint directory that is on disk. size: bytes. sha256: hexadecimal, of the bytes that were written."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Files that one rank, or all ranks, wrote in a save. seconds: duration of writing.

    waited_for: why training waited for a save that was requested in the background; None if it did not.
    """

    files: list[SavedFile]
    seconds: float
    waited_for: str | None = None

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    @classmethod
    def join(cls, parts: Sequence[Saved]) -> Saved:
        """Combine the results of ranks that wrote concurrently: all files, the longest duration, the first reason."""
        reasons = [part.waited_for for part in parts if part.waited_for is not None]
        files = [file for part in parts for file in part.files]
        return cls(files=files, seconds=max(part.seconds for part in parts), waited_for=reasons[0] if reasons else None)


class TrainEngine(ABC):
    """A model with a head (lm, value, reward) and, if it is trained, an optimizer."""

    spec: EngineSpec
    mesh: EngineMesh
    adapter_config: LoraConfig | None = None
    """The model's LoRA adapter, with module names of the Hugging Face model; None without one."""

    def chains(self, batch: Batch) -> list[Chain] | None:
        """Prefixes that the rows share, see EngineSpec.shares_prefixes; None if prefixes are not shared."""
        return chains_by_tokens(batch) if self.spec.shares_prefixes else None

    @abstractmethod
    def forward(self, batch: Batch, plan: MicroBatches, outputs: set[str], *, adapter: bool = True) -> Batch | None:
        """Compute outputs without gradient. Collective: every rank runs the same number of micro-batches.

        batch: this rank's shard with input_ids, response_mask and meta["temperature"]. adapter: False bypasses the LoRA adapter,
        if the model has one, and runs the base model alone.

        Returns a Batch of the same rows in the same order with the columns ``outputs`` (float32, CPU), or None on ranks that are
        not output ranks.

        Outputs of a language head, where response_mask is set and 0 elsewhere:
          "log_probs" (T,), "entropy" (T,)
          "sum_pi_squared" (T,): sum over the vocabulary of pi^2; never with a gradient
          "top_log_probs" (T, 2): the two largest log-probs; never with a gradient
          "sampled_entropy" (T,): the entropy where the batch's ``entropy_mask`` (T,), bool, is set and 0 elsewhere, at a fraction
          of the cost of "entropy"; never with a gradient
          "all_log_probs" (T, V): the only output that takes such memory
        Of a value head: "values" (T,), which also adds rows["last_value"] (B,). Of a reward head: "scores" (B,), at the last
        token.
        """

    @abstractmethod
    def train_step(self, batch: Batch, plan: MicroBatches, loss: Loss) -> Metrics:
        """Run one optimizer step on one mini-batch. ``batch`` is this rank's shard and has ``loss_weight`` (T,).

        Gradients of sum(loss_weight * token_loss) are summed over data-parallel ranks, never averaged; then clipped; then
        applied. If the loss or the gradient of any rank is not finite, no rank applies the update: parameters, moments and the
        schedule's step count stay unchanged.

        Metrics: those of the loss, plus loss, grad_norm (before clipping; NaN if the loss is not finite), skipped_updates (1 if
        the update was not applied, else 0), and lr if it was.
        """

    @abstractmethod
    def export_weights(self, *, dtype: torch.dtype | None = None, kind: Weights = "merged") -> Iterator[tuple[str, Tensor]]:
        """Yield full tensors under Hugging Face names, one at a time; of tied weights only the first.

        Collective: every rank iterates to the end. kind: with a LoRA adapter, the weights with the adapter merged (merged),
        without it (full), or the adapter's own weights under peft's file names (adapter). Without an adapter, merged and full are
        equal.
        dtype: what the caller converts to. Tensors that have to be gathered may arrive in it already if it is narrower, which
        saves traffic.
        """

    @abstractmethod
    def live_weights(self) -> dict[str, Tensor] | None:
        """Hugging Face names to the tensors that are trained, without a copy, if nothing is sharded; else None."""

    @abstractmethod
    def trained_tensors(self) -> list[Tensor]:
        """This rank's parts of the trained parameters, which optimizer steps change in place; all of these are views or shards
        that the engine computes with.
        """

    @abstractmethod
    def move(
        self,
        *,
        params: Literal["device", "cpu"] | None = None,
        grads: Literal["device", "cpu"] | None = None,
        optimizer: Literal["device", "cpu"] | None = None,
    ) -> None:
        """Move each part to the device or the host; None leaves it where it is.

        Offloading gradients frees them: they are not needed after a step.
        """

    @abstractmethod
    def save(self, path: str, *, background: bool = False) -> Future[Saved]:
        """Write model, optimizer and schedule, sharded, and the config files of transformers to the directory ``path``.

        Collective. With a LoRA adapter frozen weights are omitted and peft's adapter_config.json is added. The result, or
        OSError, refers to the files of this rank and is available when they are on disk.
        background: return as soon as the state is copied to host memory; threads write it. The bytes are the same. The next save
        must come after the end of this one. If host memory cannot hold the copies of all ranks (staging.shortage), all ranks
        write before they return.
        """

    @abstractmethod
    def load(self, path: str) -> None:
        """Restore a checkpoint that ``save`` wrote, also from another number of ranks. Collective.

        Raises FileNotFoundError or ValueError.
        """

    @abstractmethod
    def export_hf(self, path: str) -> None:
        """Write a Hugging Face directory: safetensors and config. A LoRA adapter is merged. Collective; rank 0 writes."""

    @abstractmethod
    def flops(self, lengths: list[int], *, backward: bool) -> float:
        """Model FLOPs of a batch of rows of these lengths.

        Per parameter and token 2 in the forward, 6 with the backward, 4 with it if the parameter is frozen; plus attention.
        """
