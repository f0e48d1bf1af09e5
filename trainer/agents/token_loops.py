"""verl's interface of agent loops that work on token ids, and the file that names them (agent.agent_loop_config_path).

A loop gets what verl gives it: the configuration, a tokenizer, a row of the data set and a manager whose ``generate`` samples
after token ids. How its calls become rows for training: trainer/agents/sessions/token_calls.py.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import yaml
from pydantic import BaseModel

from trainer.agents.formats import ToolCall, call_format, parse_turn
from trainer.agents.verl_modules import load_named
from trainer.run.verl_dataset import RLHFDataset

_REGISTERED: dict[str, type[AgentLoopBase]] = {}
"""Classes with ``@register``, by name."""


class TokenOutput(BaseModel):
    """A sampled turn: token_ids with the stop token, log_probs of each. stop_reason: completed, or length."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    stop_reason: str | None = None


class AgentLoopMetrics(BaseModel):
    """Seconds that a loop has measured."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    num_preempted: int = -1


class AgentLoopOutput(BaseModel):
    """What a loop returns. response_mask: 1 for sampled tokens to train, 0 for all others.

    response_logprobs is not used: those of the engine are kept with the sampled tokens. reward_score: None: it is scored.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    reward_score: float | None = None
    num_turns: int = 0
    metrics: AgentLoopMetrics
    extra_fields: dict[str, Any] = {}
    multi_modal_data: dict[str, Any] | None = None


class AsyncLLMServerManager:
    """Samples for one session. request_id is not needed: a call is identified by its tokens."""

    def __init__(self, sample: Callable[[list[int], int | None], Awaitable[TokenOutput]], sampling: Mapping[str, Any]) -> None:
        """sampling: the parameters that loops get, and cannot change."""
        self._sample, self._sampling = sample, dict(sampling)

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: Mapping[str, Any], **kwargs: Any
    ) -> TokenOutput:
        """A turn of the model after ``prompt_ids``. Raises ValueError for images and for other sampling parameters."""
        if given := sorted(name for name, value in kwargs.items() if value is not None):
            raise ValueError(f"generate: {', '.join(given)} is not supported, only text")
        free = {"logprobs", "max_tokens", "max_new_tokens"}
        for name, value in sampling_params.items():
            if name not in free and value != self._sampling.get(name):
                raise ValueError(
                    f"generate: sampling_params has {name}={value!r:.40}, and the run samples with {self._sampling.get(name)}; "
                    "the parameters of actor_rollout_ref.rollout are used for all calls"
                )
        limit = sampling_params.get("max_tokens", sampling_params.get("max_new_tokens"))
        return await self._sample([*prompt_ids], limit)


class AgentLoopBase:
    """Base class of loops, one object per session. They have ``run(self, sampling_params, **kwargs) -> AgentLoopOutput``."""

    _class_initialized: ClassVar[bool] = False

    def __init__(self, trainer_config: Any, server_manager: Any, tokenizer: Any, processor: Any = None, **kwargs: Any) -> None:
        self.init_class(config=trainer_config.config, tokenizer=tokenizer, processor=processor, **kwargs)
        self.config, self.server_manager = trainer_config.config, server_manager
        self.tokenizer, self.processor = tokenizer, processor
        self.dataset_cls = RLHFDataset
        self.dataset_config = self.data_config = self.config.data
        self.rollout_config = self.config.actor_rollout_ref.rollout
        self.apply_chat_template_kwargs = self.config.data.apply_chat_template_kwargs

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any, processor: Any = None, **kwargs: Any) -> None:
        """What all objects of the class share; called for each object."""
        cls._class_initialized = True

    @cached_property
    def system_prompt(self) -> list[int]:
        """Tokens that the chat template writes before any message."""
        return [
            *self.tokenizer.apply_chat_template(
                [{}], add_generation_prompt=False, tokenize=True, **self.apply_chat_template_kwargs
            )
        ]

    async def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        images: None = None,
        videos: None = None,
        remove_system_prompt: bool = False,
    ) -> list[int]:
        """Token ids of messages, up to the start of the model's turn."""
        more = dict(self.apply_chat_template_kwargs)
        ids = self.tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=True, **more)
        return [*ids][len(self.system_prompt) if remove_system_prompt else 0 :]


def register(agent_name: str) -> Callable[[type[AgentLoopBase]], type[AgentLoopBase]]:
    """Decorator that gives a loop the name which rows have in agent_name."""

    def named(cls: type[AgentLoopBase]) -> type[AgentLoopBase]:
        _REGISTERED[agent_name] = cls
        return cls

    return named


class FunctionCall(BaseModel):
    """A call of a tool; arguments: JSON."""

    name: str
    arguments: str


class ToolParser:
    """verl's parsers of calls, by the formats of multi_turn.format."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        self.tokenizer, self._format = tokenizer, call_format(name)

    @classmethod
    def get_tool_parser(cls, name: str, tokenizer: Any) -> ToolParser:
        return cls(name, tokenizer)

    async def extract_tool_calls(self, responses_ids: list[int], *args: Any) -> tuple[str, list[FunctionCall]]:
        """Text before the calls, and the calls that can be read."""
        ids = responses_ids[:-1] if responses_ids and responses_ids[-1] in self.tokenizer.added_tokens_decoder else responses_ids
        turn = parse_turn(self._format, self.tokenizer.decode(ids))
        calls = [call for call in turn.calls if isinstance(call, ToolCall)]
        return turn.before + turn.after, [FunctionCall(name=call.name, arguments=json.dumps(call.arguments)) for call in calls]


def format_gpt_oss_tool_response_manually(tool_response: str, tool_call_name: str) -> str:
    """A tool's result as gpt-oss reads it."""
    return f"<|start|>functions.{tool_call_name} to=assistant<|channel|>commentary<|message|>{tool_response}<|end|>"


def add_generation_prompt_for_gpt_oss(message_content: str) -> str:
    """The text, and the start of the model's turn."""
    return f"{message_content}<|start|>assistant"


def load_token_loops(path: str, key: str) -> dict[str, Callable[..., Any]]:
    """{name: what makes a loop of it} of a file [{name, _target_, ...}], and of the classes with ``@register`` that it loads.

    _target_: module.Class, or path/to/file.py:Class; other values of an entry are arguments. Raises ValueError, one line.
    """
    key, file = f"{key}={path}", Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"{key}: no such file")
    try:
        entries = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeError) as error:
        raise ValueError(f"{key}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(entries, list) or not all(isinstance(one, dict) and {"name", "_target_"} <= one.keys() for one in entries):
        raise ValueError(f"{key}: it must be a list, whose entries have name and _target_")
    found: dict[str, Callable[..., Any]] = {}
    for i, entry in enumerate(entries):
        cls = load_named(entry["_target_"], f"{key}: [{i}]._target_")
        if not issubclass(cls, AgentLoopBase):
            base = "verl.experimental.agent_loop.agent_loop.AgentLoopBase"
            raise ValueError(f"{key}: [{i}]._target_={entry['_target_']}: the class is no subclass of {base}")
        found[entry["name"]] = partial(cls, **{name: value for name, value in entry.items() if name != "_target_"})
    return {**_REGISTERED, **found}
