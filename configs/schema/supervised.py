"""Schema shared by the supervised programs, `trainer.main_sft` and `trainer.main_reward_model`."""

from dataclasses import dataclass
from typing import Any, Literal

from configs.schema.alarms import SFTAlarmsConfig
from configs.schema.common import (
    Frequency,
    OptimConfig,
    Positive,
    PositiveFloat,
    RayConfig,
    RunConfig,
    ShardedConfig,
    TokenizedModelConfig,
    TrainingTimeoutsConfig,
)


@dataclass(slots=True, kw_only=True, frozen=True)
class SupervisedDataConfig:
    train_files: list[str]
    val_files: list[str]
    max_length: Positive
    # Without "middle", which the prompts of PPO allow: it would remove the boundary between prompt and response.
    truncation: Literal["error", "left", "right"]
    train_batch_size: Positive
    micro_batch_size_per_gpu: Positive | None
    use_dynamic_bsz: bool
    max_token_len_per_gpu: Positive
    shuffle: bool
    seed: int | None
    apply_chat_template_kwargs: dict[str, Any]


@dataclass(slots=True, kw_only=True, frozen=True)
class SupervisedEngineConfig(ShardedConfig):
    grad_clip: PositiveFloat


@dataclass(slots=True, kw_only=True, frozen=True)
class SupervisedTrainerConfig(RunConfig):
    test_freq: Frequency
    max_ckpt_to_keep: Positive | None
    export_dir: str | None


@dataclass(slots=True, kw_only=True, frozen=True)
class SupervisedConfig:
    data: SupervisedDataConfig
    model: TokenizedModelConfig
    engine: SupervisedEngineConfig
    optim: OptimConfig
    alarms: SFTAlarmsConfig
    trainer: SupervisedTrainerConfig
    timeouts: TrainingTimeoutsConfig
    ray_kwargs: RayConfig
