"""Schema of `multi_turn` and `agent` in `actor_rollout_ref.rollout`: tools, interactions, agent processes."""

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
    tool_timeout: PositiveFloat
    on_break: Literal["split", "refuse"]


@dataclass(slots=True, kw_only=True, frozen=True)
class AgentConfig:
    num_workers: Positive
    default_agent_loop: str  # not a Literal: FILE.py:FUNCTION selects a user's loop
    memory_limit_mb: Positive | None
