"""Schema of `trainer.main_generation`. Defaults are in configs/generation.yaml; a test compares the keys."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge

from configs.schema.common import Positive, PositiveFloat, RayConfig, TokenizedModelConfig, WorkersConfig, WorkersTimeoutsConfig
from configs.schema.ppo import ModelScoringConfig, PromptConfig, RolloutEngineConfig


@dataclass(slots=True, kw_only=True, frozen=True)
class GenerationDataConfig(PromptConfig):
    path: list[str]
    max_samples: Annotated[int, Ge(-1)]
    batch_size: Positive
    output_path: str
    output_format: Literal["parquet", "jsonl"]


@dataclass(slots=True, kw_only=True, frozen=True)
class GeneratorConfig:
    model: TokenizedModelConfig
    rollout: RolloutEngineConfig


@dataclass(slots=True, kw_only=True, frozen=True)
class SelectionConfig:
    """Files that are selected from the generated and scored responses."""

    score: bool
    best_of_n: str | None
    sft: str | None
    preferences: str | None
    min_score: float | None
    max_per_prompt: Positive


@dataclass(slots=True, kw_only=True, frozen=True)
class GenerationTimeoutsConfig(WorkersTimeoutsConfig):
    generate: PositiveFloat
    reward: PositiveFloat
    forward: PositiveFloat
    sync: PositiveFloat


@dataclass(slots=True, kw_only=True, frozen=True)
class GenerationConfig:
    data: GenerationDataConfig
    actor_rollout_ref: GeneratorConfig
    selection: SelectionConfig
    reward: ModelScoringConfig
    trainer: WorkersConfig
    timeouts: GenerationTimeoutsConfig
    ray_kwargs: RayConfig
