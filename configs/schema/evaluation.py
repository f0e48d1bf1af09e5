"""The typed tree of `trainer.main_eval`. The YAML twin is configs/evaluation.yaml; a test holds the two equal."""

from dataclasses import dataclass

from configs.schema.common import Positive, PositiveFloat, ProgramConfig
from configs.schema.ppo import RemoteScoringConfig


@dataclass(slots=True, kw_only=True, frozen=True)
class EvaluationDataConfig:
    path: list[str]
    response_key: str
    data_source_key: str
    reward_model_key: str
    score_key: str | None
    output_path: str


@dataclass(slots=True, kw_only=True, frozen=True)
class MetricsConfig:
    k: list[Positive] | None
    pass_score: float
    vote: str
    bootstrap_samples: Positive


@dataclass(slots=True, kw_only=True, frozen=True)
class EvaluationTimeoutsConfig:
    reward: PositiveFloat


@dataclass(slots=True, kw_only=True, frozen=True)
class EvaluationConfig:
    data: EvaluationDataConfig
    metrics: MetricsConfig
    reward: RemoteScoringConfig
    trainer: ProgramConfig
    timeouts: EvaluationTimeoutsConfig
