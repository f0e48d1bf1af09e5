"""The typed tree of `trainer.main_serve_reward`. The YAML twin is configs/serve_reward.yaml; a test holds the two equal."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from configs.schema.common import Positive, PositiveFloat, ProgramConfig
from configs.schema.ppo import ScoringConfig


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
class ServeTimeoutsConfig:
    reward: PositiveFloat


@dataclass(slots=True, kw_only=True, frozen=True)
class ServeRewardConfig:
    reward: ScoringConfig
    server: ServerConfig
    trainer: ProgramConfig
    timeouts: ServeTimeoutsConfig
