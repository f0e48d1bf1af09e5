"""What an agent process is started with, and what its sessions share: tokenizer, tools, environment, call format."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from configs.schema.agents import AgentConfig, MultiTurnConfig
from trainer.agents.environments import load_environment, restoration
from trainer.agents.formats import Format, call_format
from trainer.agents.tools import AnyTool
from trainer.agents.verl_modules import load_function_tools, load_interactions, load_tools, unique
from trainer.data.seam import Seams

KEY = "actor_rollout_ref.rollout"


@dataclass(frozen=True, slots=True)
class AgentSetup:
    """What an agent process is started with. template_kwargs: of the chat template. run: configuration, for loops of verl."""

    tokenizer: PreTrainedTokenizerBase
    template_kwargs: dict[str, Any]
    multi_turn: MultiTurnConfig
    agent: AgentConfig
    run: dict[str, Any] = field(default_factory=dict)


class AgentKit:
    """What the sessions of a process share: tokenizer, tools, interactions, call format. Loads the files of the user."""

    def __init__(self, setup: AgentSetup) -> None:
        """Raises ValueError, one line, for a file that does not load, or an unknown format."""
        config = self.config = setup.multi_turn
        self.seams = Seams(setup.tokenizer, setup.template_kwargs)
        self.format: Format = call_format(config.format)
        self.tools: list[AnyTool] = []
        self.interactions: dict[str, Any] = {}
        if config.tool_config_path is not None:
            self.tools += load_tools(config.tool_config_path, f"{KEY}.multi_turn.tool_config_path")
        if config.function_tool_path is not None:
            self.tools += load_function_tools(config.function_tool_path, f"{KEY}.multi_turn.function_tool_path")
        unique(self.tools, f"{KEY}.multi_turn.function_tool_path")
        if config.interaction_config_path is not None:
            self.interactions = load_interactions(config.interaction_config_path, f"{KEY}.multi_turn.interaction_config_path")
        self.environment = None
        if config.environment is not None:
            self.environment = load_environment(config.environment, f"{KEY}.multi_turn.environment")

    @property
    def continues(self) -> bool:
        """Whether sessions can be continued from their journals, in another process."""
        return self.environment is None or restoration(self.environment) != "opaque"
