"""Stand-ins for verl's modules: files of the user that import verl's interfaces run without it.

While such a file is loaded, and only if verl is not installed, modules with verl's names have what these files import. They are
gone afterwards, so that nothing else takes them for verl.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

_LOADING = threading.RLock()


def _of(module: str, *names: str) -> dict[str, str]:
    return {name: f"{module}:{name}" for name in names}


_OPENAI = [f"OpenAIFunction{part}Schema" for part in ("Property", "Parameters", "", "Tool")]
_SCHEMAS = _of("agents.tools", *_OPENAI, "ToolResponse")
_loops = partial(_of, "agents.token_loops")
_NAMES: dict[str, dict[str, str]] = {
    "verl.tools.schemas": _SCHEMAS,
    "verl.tools.base_tool": _SCHEMAS | {"BaseTool": "agents.tools:BaseTool"},
    "verl.tools.function_tool": {"function_tool": "agents.tools:tool", "FunctionTool": "agents.tools:FunctionTool"},
    "verl.tools.gsm8k_tool": {"Gsm8kTool": "agents.native.gsm8k_tool:Gsm8kTool"},
    "verl.tools.search_tool": {"SearchTool": "agents.native.search_tool:SearchTool"},
    "verl.tools.sandbox_fusion_tools": {"SandboxFusionTool": "agents.native.python_tool:SandboxFusionTool"},
    "verl.interactions.base": {"BaseInteraction": "agents.interactions:BaseInteraction"},
    "verl.interactions.gsm8k_interaction": {"Gsm8kInteraction": "agents.native.gsm8k_interaction:Gsm8kInteraction"},
    "verl.utils.rollout_trace": {"rollout_trace_op": "agents.verl_modules:rollout_trace_op"},
    "verl.utils.reward_score.gsm8k": {"compute_score": "rewards.rules.verl_scores:gsm8k_score"},
    "verl.utils.reward_score.math_dapo": {"compute_score": "rewards.rules.verl_scores:math_dapo_score"},
    "verl.experimental.agent_loop.agent_loop": _loops(
        "AgentLoopBase", "AgentLoopMetrics", "AgentLoopOutput", "AsyncLLMServerManager", "TokenOutput", "register"
    ),
    "verl.experimental.agent_loop": _loops("AgentLoopBase", "AgentLoopOutput", "AsyncLLMServerManager", "register"),
    "verl.workers.rollout.replica": _loops("TokenOutput"),
    "verl.experimental.agent_loop.tool_parser": _loops("FunctionCall", "ToolParser"),
    "verl.experimental.agent_loop.utils": _loops("add_generation_prompt_for_gpt_oss", "format_gpt_oss_tool_response_manually"),
    "verl.utils.dataset": {"RLHFDataset": "run.verl_dataset:RLHFDataset"},
    "verl.utils.dataset.rl_dataset": {"RLHFDataset": "run.verl_dataset:RLHFDataset"},
}
"""{module of verl: {name: module and name in trainer/}}. Imported when a file asks for them: a scorer needs no tools."""


class _StandIn(ModuleType):
    """A module of verl with what ``_NAMES`` has for it."""

    def __getattr__(self, name: str) -> Any:
        place = _NAMES.get(self.__name__, {}).get(name)
        if place is None:
            raise AttributeError(f"the stand-in for {self.__name__} has no {name}; verl is not installed", name=name, obj=self)
        module, _, attribute = place.partition(":")
        return vars(importlib.import_module(f"trainer.{module}"))[attribute]


@contextmanager
def verl_modules() -> Iterator[None]:
    """Context in which verl's modules can be imported."""
    with _LOADING:  # sys.modules belongs to the whole process
        # A folder named verl in the working directory has a spec too, without an origin.
        if "verl" in sys.modules or ((spec := importlib.util.find_spec("verl")) is not None and spec.origin is not None):
            yield
            return
        packages = {name[: i.start()] for name in _NAMES for i in re.finditer(r"\.", name)}
        modules = {name: _StandIn(name) for name in sorted({*packages, *_NAMES})}
        for name, module in modules.items():
            vars(module)["__all__"] = [*_NAMES.get(name, ())]
            if name in packages:
                module.__path__ = []
            parent, _, own = name.rpartition(".")
            if parent:
                setattr(modules[parent], own, module)
        sys.modules.update(modules)
        try:
            yield
        finally:
            for name in modules:
                sys.modules.pop(name, None)


def missing(error: BaseException) -> str:
    """What to do about a module that a file of the user lacks, for messages; empty for other errors."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if name == "verl":
        return f"; verl is not installed, and without it there are {', '.join(_NAMES)}"
    return "; run: pip install 'tandem[hub]'" if name == "datasets" else ""
