"""Schema blocks shared by several programs and roles: model, optimizer, FSDP and Megatron engines, `trainer`, timeouts.

Only types and constraints. Defaults, and the comments that explain them, are in the YAML files of configs/.
"""

import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, Protocol

from annotated_types import Ge, Gt, Le, Lt

from configs.base.keys import Follows

Positive = Annotated[int, Gt(0)]
NonNegative = Annotated[int, Ge(0)]
NonNegativeFloat = Annotated[float, Ge(0.0)]
PositiveFloat = Annotated[float, Gt(0.0)]
Fraction = Annotated[float, Ge(0.0), Le(1.0)]
PositiveFraction = Annotated[float, Gt(0.0), Le(1.0)]
Beta = Annotated[float, Ge(0.0), Lt(1.0)]
Dtype = Literal["float32", "bfloat16", "float16", "float64"]
AggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
# A trailing + computes the value of the estimator with the gradient of k2; kl, mse and low_var_kl are verl's names of k1, k2 and
# k3.
KLKind = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "full", "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+", "full+"
]  # fmt: skip
Strategy = Literal["fsdp", "megatron"]
# Interval in steps; zero or negative values disable it.
Frequency = int | Literal["after_each_epoch"]
SaveFrequency = Frequency | Literal["end"]


def is_ever(frequency: SaveFrequency) -> bool:
    """Whether validation or checkpoints are enabled at all."""
    return isinstance(frequency, str) or frequency > 0


def is_repeated(frequency: SaveFrequency) -> bool:
    """Whether there are checkpoints before the last step."""
    return frequency != "end" and is_ever(frequency)


def steps_between(frequency: SaveFrequency, steps_per_epoch: int | None = None) -> int:
    """A frequency in steps: -1 for never, more steps than any run has for ``end``."""
    if frequency == "end":
        return sys.maxsize
    if frequency == "after_each_epoch":
        assert steps_per_epoch is not None
        return steps_per_epoch
    return frequency


class Checked(ABC):
    """A block with rules of its own; rules that span blocks are in configs/validation."""

    __slots__ = ()

    @abstractmethod
    def problems(self) -> Iterator[str]:
        """One line for each value, or combination of values, that cannot work."""


class MicroBatching(NamedTuple):
    """Keys that size the micro-batches of a role, see configs.validation.batches.micro_batch_limits.

    per_gpu: rows per copy of the model. over_all: older key, rows over all copies. dynamic: max_tokens applies, not a number of
    rows. max_tokens: per GPU.
    """

    per_gpu: int | None
    over_all: int | None
    dynamic: bool
    max_tokens: int


@dataclass(slots=True, kw_only=True, frozen=True)
class TiledMLPConfig:
    enabled: bool
    num_shards: Positive


@dataclass(slots=True, kw_only=True, frozen=True)
class ModelConfig:
    path: str
    trust_remote_code: bool
    enable_gradient_checkpointing: bool
    enable_activation_offload: bool
    tiled_mlp: TiledMLPConfig
    override_config: dict[str, Any]
    lora_rank: NonNegative
    lora_alpha: NonNegativeFloat
    target_modules: str | list[str]
    lora_adapter_path: str | None
    router_aux_loss_coef: NonNegativeFloat

    @property
    def has_adapter(self) -> bool:
        """Whether the model has a LoRA adapter, which is then the only trained part."""
        return self.lora_rank > 0 or self.lora_adapter_path is not None


@dataclass(slots=True, kw_only=True, frozen=True)
class TokenizedModelConfig(ModelConfig):
    """A model with its tokenizer."""

    tokenizer_path: str | None
    custom_chat_template: str | None


@dataclass(slots=True, kw_only=True, frozen=True)
class OptimConfig:
    lr: NonNegativeFloat
    betas: tuple[Beta, Beta]
    weight_decay: NonNegativeFloat
    lr_scheduler_type: Literal["constant", "cosine", "linear", "wsd"]
    # -1 selects lr_warmup_steps_ratio; 0 disables the warm-up.
    lr_warmup_steps: Annotated[int, Ge(-1)]
    lr_warmup_steps_ratio: Fraction
    min_lr_ratio: Fraction
    num_cycles: PositiveFloat
    total_training_steps: Annotated[int, Ge(-1)]


@dataclass(slots=True, kw_only=True, frozen=True)
class FSDPConfig:
    model_dtype: Dtype
    dtype: Dtype
    reshard_after_forward: bool
    use_no_sync_for_gradient_accumulation: bool
    use_torch_compile: bool | None
    param_offload: bool
    optimizer_offload: bool
    # 0 passes here and is refused in configs/validation/parallel.py, with an explanation of the allowed values.
    fsdp_size: Annotated[int, Ge(-1)]
    ulysses_sequence_parallel_size: Positive


CUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
)
"""Parallel sizes of Megatron that roles on the same GPUs share."""


@dataclass(slots=True, kw_only=True, frozen=True)
class MegatronConfig:
    tensor_model_parallel_size: Positive
    pipeline_model_parallel_size: Positive
    virtual_pipeline_model_parallel_size: Positive | None
    context_parallel_size: Positive
    sequence_parallel: bool
    use_distributed_optimizer: bool
    # Not float16: Megatron gradients in float16 need loss scaling.
    dtype: Literal["float32", "bfloat16"]
    param_offload: bool
    grad_offload: bool
    optimizer_offload: bool
    override_transformer_config: dict[str, Any]

    @property
    def model_parallel_size(self) -> int:
        """GPUs that hold one copy of the model and work on the same rows."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size


Sharding = FSDPConfig | MegatronConfig


@dataclass(slots=True, kw_only=True, frozen=True)
class ShardedConfig:
    """Options of every role on a training engine."""

    # Both blocks always exist, so that switching the engine is a change of one key; only the selected one is used.
    strategy: Strategy
    fsdp_config: FSDPConfig
    megatron: MegatronConfig

    @property
    def sharding(self) -> Sharding:
        return self.fsdp_config if self.strategy == "fsdp" else self.megatron


@dataclass(slots=True, kw_only=True, frozen=True)
class FollowingConfig(ShardedConfig):
    """A role that by default is sharded like the actor, whose GPUs it shares unless placement assigns others."""

    fsdp_config: Annotated[FSDPConfig, Follows("actor_rollout_ref.actor.fsdp_config")]
    megatron: Annotated[MegatronConfig, Follows("actor_rollout_ref.actor.megatron")]


@dataclass(slots=True, kw_only=True, frozen=True)
class ProgramConfig:
    """The `trainer` block of every program."""

    default_local_dir: str
    seed: int
    dry_run: Literal["config", "full"] | None
    full_traceback: bool


class RunnableConfig(Protocol):
    """Configuration of a program."""

    @property
    def trainer(self) -> ProgramConfig: ...


@dataclass(slots=True, kw_only=True, frozen=True)
class WorkersConfig(ProgramConfig, Checked):
    """The `trainer` block of every program that starts workers."""

    device: Literal["cuda", "cpu"]
    backend: Literal["ray", "local"]
    nnodes: Positive
    n_gpus_per_node: Positive

    @property
    def sizes(self) -> str:
        """The number of workers as a product, for messages."""
        return f"trainer.nnodes * trainer.n_gpus_per_node = {self.nnodes} * {self.n_gpus_per_node}"

    def problems(self) -> Iterator[str]:
        if self.backend == "local" and self.nnodes * self.n_gpus_per_node > 1:
            remedy = f"not {self.nnodes * self.n_gpus_per_node} workers ({self.sizes}); use one worker, or trainer.backend=ray"
            yield f"trainer.backend=local: runs a single worker in this process, {remedy}"


@dataclass(slots=True, kw_only=True, frozen=True)
class CheckpointConfig:
    async_save: bool
    remote_dir: str | None
    max_remote_ckpt_to_keep: Positive | None


@dataclass(slots=True, kw_only=True, frozen=True)
class WatchConfig:
    memory_warn: Fraction
    memory_stop: Fraction
    disk_warn_gb: NonNegativeFloat
    disk_stop_gb: NonNegativeFloat


@dataclass(slots=True, kw_only=True, frozen=True)
class RunConfig(WorkersConfig):
    """The `trainer` block of every training program."""

    project_name: str
    experiment_name: str
    logger: list[str]
    total_epochs: Positive
    total_training_steps: Positive | None
    save_freq: SaveFrequency
    checkpoint: CheckpointConfig
    best_metric: str | None
    objective: str | None  # a metric's name, with a leading minus to minimize it
    resume_mode: Literal["auto", "disable", "resume_path"]
    resume_from_path: str | None
    deterministic: bool
    max_restarts: NonNegative
    walltime: str | None  # parsed by seconds_of
    private: bool
    watch: WatchConfig

    def problems(self) -> Iterator[str]:
        yield from WorkersConfig.problems(self)
        for key, name in (("project_name", self.project_name), ("experiment_name", self.experiment_name)):
            # experiment_name is part of default_local_dir's default, project_name of that of earlier versions. A path separator
            # is allowed, leaving the directory is not.
            if name.startswith("/") or ".." in name.split("/"):
                yield f"trainer.{key}={name}: is part of the run directory's path and must not lead out of it"
        if self.resume_mode == "resume_path" and self.resume_from_path is None:
            yield "trainer.resume_mode=resume_path: trainer.resume_from_path is null; set it to a global_step_N directory"
        if self.walltime is not None:
            try:
                seconds_of(self.walltime)
            except ValueError as error:
                yield f"trainer.walltime={self.walltime}: {error}"


def seconds_of(walltime: str) -> float:
    """Seconds of a time limit: "5400", "90:00", "01:30:00" and "0-01:30:00" are all 1.5 hours. Raises ValueError if invalid."""
    match = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d\d)|(\d+(?:\.\d*)?)", walltime)
    if match is None:
        raise ValueError("must be seconds, or [[days-]hours:]minutes:seconds")
    if match[5] is not None:  # a plain number of seconds
        return float(match[5])
    # Absent groups count as 0: "90:00" has no days and no hours.
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups()[:4])
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


@dataclass(slots=True, kw_only=True, frozen=True)
class WorkersTimeoutsConfig:
    """Timeouts, in seconds, of every program that starts workers."""

    join: PositiveFloat
    start: PositiveFloat
    collective: PositiveFloat


@dataclass(slots=True, kw_only=True, frozen=True)
class TrainingTimeoutsConfig(WorkersTimeoutsConfig):
    """Timeouts, in seconds, of every training program."""

    forward: PositiveFloat
    update: PositiveFloat
    save: PositiveFloat
    load: PositiveFloat
    ask: PositiveFloat


@dataclass(slots=True, kw_only=True, frozen=True)
class RayConfig:
    ray_init: dict[str, Any]
