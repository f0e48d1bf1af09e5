"""Schema of `trainer.main_sft`, `trainer.main_reward_model` and `trainer.main_dpo`. Defaults are in
configs/{sft,reward_model,dpo}_trainer.yaml; a test compares the keys.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Lt

from configs.schema.alarms import SFTAlarmsConfig
from configs.schema.common import (
    Checked,
    Frequency,
    MicroBatching,
    NonNegativeFloat,
    OptimConfig,
    Positive,
    PositiveFloat,
    PositiveFraction,
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

    @property
    def micro_batching(self) -> MicroBatching:
        return MicroBatching(self.micro_batch_size_per_gpu, None, self.use_dynamic_bsz, self.max_token_len_per_gpu)


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


@dataclass(slots=True, kw_only=True, frozen=True)
class SFTDataConfig(SupervisedDataConfig):
    # If set, prompt_key and response_key are not used.
    messages_key: str | None
    tools_key: str | None
    prompt_key: str
    response_key: str


@dataclass(slots=True, kw_only=True, frozen=True)
class SFTTrainerConfig(SupervisedTrainerConfig):
    stop_at_probability: PositiveFraction | None


@dataclass(slots=True, kw_only=True, frozen=True)
class SFTConfig(SupervisedConfig):
    data: SFTDataConfig
    trainer: SFTTrainerConfig


@dataclass(slots=True, kw_only=True, frozen=True)
class PreferenceDataConfig(SupervisedDataConfig):
    prompt_key: str | None
    chosen_key: str
    rejected_key: str


@dataclass(slots=True, kw_only=True, frozen=True)
class RewardModelDataConfig(PreferenceDataConfig):
    margin_key: str | None


@dataclass(slots=True, kw_only=True, frozen=True)
class PairLossConfig:
    center_rewards_coefficient: NonNegativeFloat


@dataclass(slots=True, kw_only=True, frozen=True)
class RewardModelConfig(SupervisedConfig):
    data: RewardModelDataConfig
    loss: PairLossConfig


@dataclass(slots=True, kw_only=True, frozen=True)
class DPOLossConfig(Checked):
    kind: Literal["sigmoid", "ipo"]
    beta: PositiveFloat
    label_smoothing: Annotated[float, Ge(0.0), Lt(0.5)]
    sft_coef: NonNegativeFloat

    def problems(self) -> Iterator[str]:
        if self.kind == "ipo" and self.label_smoothing:
            yield f"loss.label_smoothing={self.label_smoothing}: loss.kind=ipo has no label smoothing; set 0"


@dataclass(slots=True, kw_only=True, frozen=True)
class DPOConfig(SupervisedConfig):
    data: PreferenceDataConfig
    loss: DPOLossConfig
