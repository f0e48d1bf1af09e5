"""Schema of `trainer.main_parity`. Defaults are in configs/parity.yaml; a test compares the keys."""

from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Ge

from configs.schema.common import (
    Dtype,
    Fraction,
    NonNegative,
    NonNegativeFloat,
    PositiveFloat,
    RayConfig,
    ShardedConfig,
    TokenizedModelConfig,
    WorkersConfig,
    WorkersTimeoutsConfig,
)
from configs.schema.ppo import PromptConfig, RolloutEngineConfig


@dataclass(slots=True, kw_only=True, frozen=True)
class ParityDataConfig(PromptConfig):
    files: list[str]
    max_samples: Annotated[int, Ge(-1)]


@dataclass(slots=True, kw_only=True, frozen=True)
class ParityModelsConfig:
    model: TokenizedModelConfig
    actor: ShardedConfig
    rollout: RolloutEngineConfig

    def rollout_of(self, engine: str) -> RolloutEngineConfig:
        """The rollout options for one of the compared engines, whose name configs/validation/parity.py has validated."""
        return replace(self.rollout, name=engine)  # type: ignore[arg-type]


@dataclass(slots=True, kw_only=True, frozen=True)
class ByDtypeConfig:
    """A bound for each dtype; the coarser dtype of trainer and engine selects it."""

    float64: NonNegativeFloat
    float32: NonNegativeFloat
    float16: NonNegativeFloat
    bfloat16: NonNegativeFloat

    def of(self, dtype: Dtype) -> float:
        return {"float64": self.float64, "float32": self.float32, "float16": self.float16, "bfloat16": self.bfloat16}[dtype]


@dataclass(slots=True, kw_only=True, frozen=True)
class BoundsConfig:
    token_agreement: Fraction
    log_prob_max: ByDtypeConfig
    log_prob_mean: ByDtypeConfig
    # A two-sided z-score: |z| is compared.
    draw_z: NonNegativeFloat
    wrong_ends: NonNegative
    wrong_prompts: NonNegative


@dataclass(slots=True, kw_only=True, frozen=True)
class ParityTimeoutsConfig(WorkersTimeoutsConfig):
    generate: PositiveFloat
    forward: PositiveFloat
    sync: PositiveFloat
    ask: PositiveFloat


@dataclass(slots=True, kw_only=True, frozen=True)
class ParityConfig:
    model: str
    engines: list[str]
    data: ParityDataConfig
    actor_rollout_ref: ParityModelsConfig
    bounds: BoundsConfig
    trainer: WorkersConfig
    timeouts: ParityTimeoutsConfig
    ray_kwargs: RayConfig
