"""Schema of `trainer.main_serve_reward`. Defaults are in configs/serve_reward.yaml; a test compares the keys."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from configs.schema.common import Positive, PositiveFloat, RayConfig, TokenizedModelConfig, WorkersConfig, WorkersTimeoutsConfig
from configs.schema.ppo import RolloutEngineConfig, ScoringConfig
from configs.schema.scoring_model import ReadingModelConfig


@dataclass(slots=True, kw_only=True, frozen=True)
class ServerConfig:
    """The HTTP server of trainer.main_serve_reward."""

    host: str
    # 0 lets the operating system choose a free port.
    port: Annotated[int, Ge(0), Le(65535)]
    token_env: str
    batch_size: Positive
    max_connections: Positive
    max_request_mb: PositiveFloat
    log_every: Positive


@dataclass(slots=True, kw_only=True, frozen=True)
class ServedModelConfig(ReadingModelConfig):
    # Not "running": a server has no training steps, and statistics over all clients would mix different runs.
    normalize: Literal["stored"] | None


@dataclass(slots=True, kw_only=True, frozen=True)
class JudgeEngineConfig:
    """A language model that judges responses on a rollout engine of the server."""

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
