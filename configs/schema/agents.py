"""Schema of rollout.multi_turn and rollout.agent: conversations with tools and environments, agent processes."""

from dataclasses import dataclass
from typing import Literal

from configs.schema.common import Positive, PositiveFloat


@dataclass(slots=True, kw_only=True, frozen=True)
class MultiTurnConfig:
    enable: bool
    max_assistant_turns: Positive | None
    max_user_turns: Positive | None
    max_parallel_calls: Positive
    max_tool_response_length: Positive
    tool_response_truncate_side: Literal["left", "middle", "right"]
    format: str  # not a Literal: FILE.py:FUNCTION selects a user's parser
    tool_config_path: str | None
    function_tool_path: str | None
    interaction_config_path: str | None
    environment: str | None
    tool_timeout: PositiveFloat
    on_break: Literal["split", "refuse"]


@dataclass(slots=True, kw_only=True, frozen=True)
class AgentConfig:
    num_workers: Positive
    default_agent_loop: str | None  # not a Literal: FILE.py:FUNCTION selects a user's loop
    agent_loop_config_path: str | None
    program: str | None
    memory_limit_mb: Positive | None
