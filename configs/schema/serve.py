"""Schema of `trainer.main_serve`. Defaults are in configs/serve.yaml; a test compares the keys."""

from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge, Le

from configs.schema.common import NonNegative, PositiveFloat, RayConfig, WorkersConfig, WorkersTimeoutsConfig
from configs.schema.generation import GeneratorConfig
from configs.schema.serve_reward import ListenerConfig


@dataclass(slots=True, kw_only=True, frozen=True)
class ModelServerConfig(ListenerConfig):
    """The HTTP server of trainer.main_serve. It always has a token."""

    max_waiting: NonNegative


@dataclass(slots=True, kw_only=True, frozen=True)
class TemplateConfig:
    apply_chat_template_kwargs: dict[str, Any]


@dataclass(slots=True, kw_only=True, frozen=True)
class CallFormatConfig:
    # Not a Literal: besides the registered names, FILE.py:FUNCTION selects a user's format.
    format: str


@dataclass(slots=True, kw_only=True, frozen=True)
class ModelTimeoutsConfig(WorkersTimeoutsConfig):
    generate: PositiveFloat
    sync: PositiveFloat


@dataclass(slots=True, kw_only=True, frozen=True)
class ServeConfig:
    model: str
    port: Annotated[int, Ge(0), Le(65535)]
    actor_rollout_ref: GeneratorConfig
    data: TemplateConfig
    multi_turn: CallFormatConfig
    server: ModelServerConfig
    trainer: WorkersConfig
    timeouts: ModelTimeoutsConfig
    ray_kwargs: RayConfig
