"""verl's interfaces for tools and interactions: files written for verl run without it.

While a user's file is loaded, and only if verl is not installed, modules with verl's names have what such files import. They are
gone afterwards, so that nothing else takes them for verl.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from trainer.agents import tools
from trainer.agents.interactions import BaseInteraction
from trainer.agents.mcp_tools import load_mcp_tools
from trainer.agents.tools import AnyTool, FunctionTool, StatefulTool
from trainer.rewards.rules import gsm8k
from trainer.run.user_code import check_file, describe, load_module

_LOADING = threading.RLock()
_NATIVE = {
    "verl.tools.gsm8k_tool": ("gsm8k_tool", "Gsm8kTool"),
    "verl.tools.search_tool": ("search_tool", "SearchTool"),
    "verl.tools.sandbox_fusion_tools": ("python_tool", "SandboxFusionTool"),
    "verl.interactions.gsm8k_interaction": ("gsm8k_interaction", "Gsm8kInteraction"),
}
"""Modules whose classes verl's examples name, and the classes here. They are imported by name: they import this folder."""


def rollout_trace_op(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as it is: calls of tools are recorded by their session."""
    return function


def compute_gsm8k_score(
    solution_str: str, ground_truth: str, method: Any = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """verl's GSM8K score: ``score`` for the right number, ``format_score`` for another one, 0 for none."""
    if gsm8k.extract(solution_str, method) is None:
        return 0.0
    return score if gsm8k.score(solution_str, ground_truth, method) else format_score


def _stand_ins() -> dict[str, ModuleType]:
    schemas = {name: value for name, value in vars(tools).items() if name.startswith("OpenAIFunction") or name == "ToolResponse"}
    contents: dict[str, dict[str, Any]] = {
        "verl.tools.schemas": schemas,
        "verl.tools.base_tool": schemas | {"BaseTool": tools.BaseTool},
        "verl.tools.function_tool": {"function_tool": tools.tool, "FunctionTool": FunctionTool},
        "verl.interactions.base": {"BaseInteraction": BaseInteraction},
        "verl.utils.rollout_trace": {"rollout_trace_op": rollout_trace_op},
        "verl.utils.reward_score.gsm8k": {"compute_score": compute_gsm8k_score},
    }
    for name, (native, cls) in _NATIVE.items():
        contents[name] = {cls: vars(importlib.import_module(f"trainer.agents.native.{native}"))[cls]}
    packages = {name.rpartition(".")[0] for name in contents} | {"verl"}
    modules = {name: ModuleType(name) for name in sorted({*packages, *contents})}
    for name, module in modules.items():
        vars(module).update(contents.get(name, {}))
        if name in packages:
            module.__path__ = []
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(modules[parent], own, module)
    return modules


@contextmanager
def verl_modules() -> Iterator[None]:
    """Context in which verl's modules can be imported."""
    with _LOADING:  # sys.modules belongs to the whole process
        # A folder named verl in the working directory has a spec too, without an origin.
        if "verl" in sys.modules or ((spec := importlib.util.find_spec("verl")) is not None and spec.origin is not None):
            yield
            return
        modules = _stand_ins()
        sys.modules.update(modules)
        try:
            yield
        finally:
            for name in modules:
                sys.modules.pop(name, None)


def load_function_tools(path: str, key: str) -> list[AnyTool]:
    """Tools of a Python file: functions with ``@tool``, or verl's ``@function_tool``, in their order.

    Raises ValueError, one line, if the file does not load, has no tool, or has two of one name.
    """
    key = f"{key}={path}"
    file = check_file(path, key)
    with verl_modules():
        try:
            module = load_module(file)
        except (Exception, SystemExit) as error:  # the user's file may raise anything
            raise ValueError(f"{key}: {file.name} does not load: {_described(error)}") from error
        # verl's own decorator returns the function, and keeps the tool.
        kept = vars(sys.modules.get("verl.tools.function_tool", module)).get("FUNCTION_TOOL_REGISTRY", {})
        own = [entry for entry in kept.values() if entry.fn.__module__ == module.__name__]
        named = [tools.tool(entry.name, schema=entry.tool_schema)(entry.fn) for entry in own]
    found = dict.fromkeys([*(value for value in vars(module).values() if isinstance(value, FunctionTool)), *named])
    if not found:
        raise ValueError(f"{key}: {file.name} has no tool; write @tool above a function (trainer.agents.tools)")
    return unique([*found], key)


def load_tools(path: str, key: str) -> list[AnyTool]:
    """Tools of a YAML file in verl's form: ``tools: [{class_name, config: {type: native}, tool_schema}]``. Raises ValueError.

    Entries with ``mcp`` are MCP servers, see load_mcp_tools.
    """
    key = f"{key}={path}"
    loaded: list[AnyTool] = []
    for i, entry in enumerate(_entries(path, "tools", key)):
        where = f"{key}: tools[{i}]"
        config = entry.get("config") or {}
        # Versions of verl without config.type have ``mcp`` alone.
        if (kind := config.get("type", "mcp" if "mcp" in entry else "native")) not in ("native", "mcp"):
            raise ValueError(f"{where}.config.type={kind}: it must be native or mcp")
        if kind == "mcp":
            loaded += load_mcp_tools(entry, where)
            continue
        cls = _load_class(entry, where)
        schema = entry.get("tool_schema")
        try:
            with verl_modules():
                # verl's own class if verl is installed: a tool may check the type.
                parse = importlib.import_module("verl.tools.schemas").OpenAIFunctionToolSchema.model_validate
                loaded.append(StatefulTool(cls(config=config, tool_schema=parse(schema) if schema else None)))
        except (Exception, SystemExit) as error:  # the user's class may raise anything
            raise ValueError(f"{where}: {entry['class_name']} cannot be created: {describe(error)}") from error
    return unique(loaded, key)


def load_interactions(path: str, key: str) -> dict[str, Any]:
    """{name: BaseInteraction} of a YAML file in verl's form: ``interaction: [{name, class_name, config}]``. Raises ValueError.

    Without a name it is that of the class, in lower case and without «Interaction».
    """
    key = f"{key}={path}"
    loaded: dict[str, Any] = {}
    for i, entry in enumerate(_entries(path, "interaction", key)):
        where = f"{key}: interaction[{i}]"
        cls = _load_class(entry, where)
        name = entry.get("name") or cls.__name__.removesuffix("Interaction").lower()
        if name in loaded:
            raise ValueError(f"{where}.name={name}: there are two interactions of this name")
        try:
            with verl_modules():
                loaded[name] = cls(config={**(entry.get("config") or {}), "name": name})
        except (Exception, SystemExit) as error:  # the user's class may raise anything
            raise ValueError(f"{where}: {entry['class_name']} cannot be created: {describe(error)}") from error
    return loaded


def unique(found: list[AnyTool], key: str) -> list[AnyTool]:
    """The tools. Raises ValueError if two have one name."""
    names = [tool.name for tool in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{key}: there are two tools of the name {', '.join(twice)}")
    return found


def _entries(path: str, section: str, key: str) -> list[dict[str, Any]]:
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"{key}: no such file")
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeError) as error:
        raise ValueError(f"{key}: not YAML: {' '.join(str(error).split())}") from error
    entries = content.get(section) if isinstance(content, dict) else None
    if not isinstance(entries, list) or not all(map(_is_entry, entries)):
        raise ValueError(f"{key}: it must have a list «{section}», whose entries have class_name; config is a mapping")
    return entries


def _is_entry(entry: Any) -> bool:
    return (
        isinstance(entry, Mapping)
        and (isinstance(entry.get("class_name"), str) or ("mcp" in entry and "class_name" not in entry))
        and isinstance(entry.get("config") or {}, Mapping)
        and isinstance(entry.get("name") or "", str)
    )


def _load_class(entry: Mapping[str, Any], where: str) -> Any:
    """The class of class_name: module.Class, or path/to/file.py:Class."""
    name = entry["class_name"]
    path, colon, attribute = name.rpartition(":")
    with verl_modules():
        try:
            if colon:
                file = check_file(path, f"{where}.class_name={name}")
                # A file of verl's own imports its neighbours: from .base_tool import BaseTool.
                package = ".".join(file.parts[-3:-1])
                module = load_module(file, package if package in ("verl.tools", "verl.interactions") else "")
            else:
                module_name, _, attribute = name.rpartition(".")
                module = importlib.import_module(module_name)
        except (Exception, SystemExit) as error:  # the user's file may raise anything
            raise ValueError(f"{where}.class_name={name} does not load: {_described(error)}") from error
    cls = vars(module).get(attribute)
    if not isinstance(cls, type):
        raise ValueError(f"{where}.class_name={name}: {module.__name__} has no class {attribute}")
    return cls


def _described(error: BaseException) -> str:
    if not isinstance(error, ModuleNotFoundError) or not (error.name or "").startswith("verl"):
        return describe(error)
    provided = ", ".join(name for name, module in _stand_ins().items() if "__path__" not in vars(module))
    return f"{describe(error)}; verl is not installed, and without it there are {provided}"
