"""The typed tree of `trainer.main_serve_reward`. The YAML twin is configs/serve_reward.yaml; a test holds the two equal."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from configs.schema.common import Positive, PositiveFloat, RayConfig, TokenizedModelConfig, WorkersConfig, WorkersTimeoutsConfig
from configs.schema.ppo import RolloutEngineConfig, ScoringConfig
from configs.schema.scoring_model import ReadingModelConfig


@dataclass(slots=True, kw_only=True, frozen=True)
class ServerConfig:
    host: str
    port: Annotated[int, Ge(0), Le(65535)]
    token_env: str
    batch_size: Positive
    max_connections: Positive
    max_request_mb: PositiveFloat
    log_every: Positive


@dataclass(slots=True, kw_only=True, frozen=True)
class ServedModelConfig(ReadingModelConfig):
    normalize: Literal["stored"] | None


@dataclass(slots=True, kw_only=True, frozen=True)
class JudgeEngineConfig:
    enable: bool
    max_prompt_length: Positive
    apply_chat_template_kwargs: dict[str, Any]
    model: TokenizedModelConfig
    rollout: RolloutEngineConfig


@dataclass(slots=True, kw_only=True, frozen=True)
class ServeTimeoutsConfig(WorkersTimeoutsConfig):
    generate: PositiveFloat
    sync: PositiveFloat
    forward: PositiveFloat
    reward: PositiveFloat


@dataclass(slots=True, kw_only=True, frozen=True)
class ServeRewardConfig:
    reward: ScoringConfig
    model: ServedModelConfig
    judge_engine: JudgeEngineConfig
    server: ServerConfig
    trainer: WorkersConfig
    timeouts: ServeTimeoutsConfig
    ray_kwargs: RayConfig
