"""Files of tools and interactions in verl's form; those written for verl run without it (trainer/run/verl_names.py)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml

from trainer.agents import tools
from trainer.agents.mcp_tools import load_mcp_tools
from trainer.agents.tools import AnyTool, FunctionTool, StatefulTool
from trainer.run.user_code import check_file, describe, load_module
from trainer.run.verl_names import verl_modules


def rollout_trace_op(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as it is: calls of tools are recorded by their session."""
    return function


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
            raise ValueError(f"{key}: {file.name} does not load: {describe(error)}") from error
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
        cls = load_named(entry["class_name"], f"{where}.class_name")
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
        cls = load_named(entry["class_name"], f"{where}.class_name")
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


def load_named(name: str, where: str) -> Any:
    """The class module.Class, or path/to/file.py:Class. where: of its name, for errors. Raises ValueError, one line."""
    path, colon, attribute = name.rpartition(":")
    with verl_modules():
        try:
            if colon:
                file = check_file(path, f"{where}={name}")
                # A file of verl's own imports its neighbours: from .base_tool import BaseTool.
                package = ".".join(file.parts[-3:-1])
                module = load_module(file, package if package in ("verl.tools", "verl.interactions") else "")
            else:
                module_name, _, attribute = name.rpartition(".")
                module = importlib.import_module(module_name)
        except (Exception, SystemExit) as error:  # the user's file may raise anything
            raise ValueError(f"{where}={name} does not load: {describe(error)}") from error
    try:
        cls = attrgetter(attribute)(module)  # not vars: stand-ins for verl's modules import what they have when it is read
    except AttributeError:
        cls = None
    if not isinstance(cls, type):
        raise ValueError(f"{where}={name}: {module.__name__} has no class {attribute}")
    return cls
