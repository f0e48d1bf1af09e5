"""Schema of `trainer.main_reward_model`. Defaults are in configs/reward_model_trainer.yaml; a test compares the keys."""

from dataclasses import dataclass

from configs.schema.common import NonNegativeFloat
from configs.schema.supervised import SupervisedConfig, SupervisedDataConfig


@dataclass(slots=True, kw_only=True, frozen=True)
class PreferenceDataConfig(SupervisedDataConfig):
    prompt_key: str | None
    chosen_key: str
    rejected_key: str
    margin_key: str | None


@dataclass(slots=True, kw_only=True, frozen=True)
class PairLossConfig:
    center_rewards_coefficient: NonNegativeFloat


@dataclass(slots=True, kw_only=True, frozen=True)
class RewardModelConfig(SupervisedConfig):
    data: PreferenceDataConfig
    loss: PairLossConfig
