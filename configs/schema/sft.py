"""The typed tree of `trainer.main_sft`. The YAML twin is configs/sft_trainer.yaml; a test holds the two equal."""

from dataclasses import dataclass
from typing import Any, Literal

from configs.schema.alarms import SFTAlarmsConfig
from configs.schema.common import (
    ModelConfig,
    OptimConfig,
    Positive,
    PositiveFloat,
    RayConfig,
    RunConfig,
    ShardedConfig,
    TrainingTimeoutsConfig,
)


@dataclass(slots=True, kw_only=True, frozen=True)
class SFTDataConfig:
    train_files: list[str]
    val_files: list[str]
    messages_key: str | None
    prompt_key: str
    response_key: str
    max_length: Positive
    truncation: Literal["error", "left", "right"]
    train_batch_size: Positive
    micro_batch_size_per_gpu: Positive | None
    use_dynamic_bsz: bool
    max_token_len_per_gpu: Positive
    shuffle: bool
    seed: int | None
    apply_chat_template_kwargs: dict[str, Any]


@dataclass(slots=True, kw_only=True, frozen=True)
class SFTEngineConfig(ShardedConfig):
    grad_clip: PositiveFloat


@dataclass(slots=True, kw_only=True, frozen=True)
class SFTTrainerConfig(RunConfig):
    max_ckpt_to_keep: Positive | None
    export_dir: str | None


@dataclass(slots=True, kw_only=True, frozen=True)
class SFTConfig:
    data: SFTDataConfig
    model: ModelConfig
    engine: SFTEngineConfig
    optim: OptimConfig
    alarms: SFTAlarmsConfig
    trainer: SFTTrainerConfig
    timeouts: TrainingTimeoutsConfig
    ray_kwargs: RayConfig
