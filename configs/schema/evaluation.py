"""Schemas of the programs without workers: `trainer.main_eval` and `trainer.main_export`.

Defaults are in configs/evaluation.yaml and configs/export.yaml; a test compares the keys.
"""

from dataclasses import dataclass
from typing import Literal

from configs.schema.common import Positive, PositiveFloat, ProgramConfig
from configs.schema.ppo import RemoteScoringConfig


@dataclass(slots=True, kw_only=True, frozen=True)
class EvaluationDataConfig:
    """Input files of an evaluation and their columns."""

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
    vote: str  # not a Literal: FILE.py:FUNCTION selects a user's function
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


@dataclass(slots=True, kw_only=True, frozen=True)
class ExportConfig:
    # Not validated against known names: the roles are those of the checkpoint, which trainer.main_export reads first.
    checkpoint: str
    output: str
    trust_remote_code: bool
    merge: bool
    role: str | None
    which: Literal["trained", "ema"]
    hub: str | None
    trainer: ProgramConfig
