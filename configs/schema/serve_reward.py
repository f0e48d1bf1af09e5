"""Schema of `trainer.main_serve_reward`. Defaults are in configs/serve_reward.yaml; a test compares the keys."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from configs.base.addresses import is_loopback
from configs.base.secrets import SHORTEST, secret_name_problems
from configs.schema.common import (
    Checked,
    Positive,
    PositiveFloat,
    RayConfig,
    TokenizedModelConfig,
    WorkersConfig,
    WorkersTimeoutsConfig,
)
from configs.schema.ppo import RolloutEngineConfig, ScoringConfig
from configs.schema.scoring_model import ReadingModelConfig


@dataclass(slots=True, kw_only=True, frozen=True)
class ListenerConfig(Checked):
    """What the HTTP servers have in common."""

    host: str
    # 0 lets the operating system choose a free port.
    port: Annotated[int, Ge(0), Le(65535)]
    token_env: str
    max_connections: Positive
    max_request_mb: PositiveFloat

    @property
    def token(self) -> str | None:
        """Value of the variable ``token_env``; None: it is not set, or empty."""
        return os.environ.get(self.token_env, "").strip() or None

    def problems(self) -> Iterator[str]:
        yield from secret_name_problems("server.token_env", self.token_env)
        if self.token and len(self.token) < SHORTEST:
            yield f"{self.token_env}: a token of {len(self.token)} characters is too easy to guess; use at least {SHORTEST}"


@dataclass(slots=True, kw_only=True, frozen=True)
class ServerConfig(ListenerConfig):
    """The HTTP server of trainer.main_serve_reward."""

    batch_size: Positive
    log_every: Positive

    def problems(self) -> Iterator[str]:
        yield from ListenerConfig.problems(self)
        # An unauthenticated server is only acceptable if no other machine can reach it.
        if not self.token and not is_loopback(self.host):
            yield (
                f"server.host={self.host}: reachable from other machines without a token; set the environment variable "
                f"{self.token_env} (server.token_env) here and where the trainer runs, or use 127.0.0.1"
            )


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
