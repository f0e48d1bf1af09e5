"""Tools that a model can call: functions, and objects with an instance per session.

A function with type hints and a docstring becomes a tool by ``@tool``. Its schema is that of transformers' get_json_schema, which
chat templates are written for. A tool with state is a subclass of ``BaseTool`` (verl's interface).
"""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, overload

from pydantic import BaseModel, ConfigDict, Field
from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

from trainer.agents.arguments import Schema, validator
from trainer.agents.isolation import completed
from trainer.rewards.scoring import finite

_PLAIN = (str, int, float, bool, list, tuple, dict, type(None), Any)


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """What a call returned. reward: of the call, 0 if the tool gives none. metrics: other numbers of the tool's.

    failed: text is an error that the tool reports.
    """

    text: str
    reward: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    failed: bool = False


class FunctionTool:
    """A function as a tool; calling the object calls the function.

    schema: OpenAI function schema. check: validator of arguments.
    """

    def __init__(self, function: Callable[..., Any], name: str | None = None, schema: Schema | None = None) -> None:
        """schema: instead of that of the function. Raises ValueError, one line, if the function cannot be described."""
        self.function = function
        self.schema = function_schema(function, name) if schema is None else schema
        self.name: str = self.schema["function"]["name"]
        self.check = _check(self.schema, closed=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def bind(self, arguments: Mapping[str, Any]) -> Callable[[], Any]:
        """The call as a function without arguments, sync or async as the tool's; it returns a ToolOutput."""
        call = partial(self.function, **arguments)

        async def awaited() -> ToolOutput:
            return output_of(await call())

        return awaited if inspect.iscoroutinefunction(self.function) else lambda: output_of(completed(call()))


@overload
def tool(function: Callable[..., Any], /) -> FunctionTool: ...


@overload
def tool(name: str | None = None, *, schema: Any = None) -> Callable[[Callable[..., Any]], FunctionTool]: ...


def tool(name: Any = None, *, schema: Any = None) -> Any:
    """Make a tool of a function: ``@tool``, or ``@tool("name")``. schema: instead of one from hints and docstring."""
    if callable(name):
        return FunctionTool(name)
    given = schema.model_dump(exclude_unset=True, exclude_none=True) if isinstance(schema, BaseModel) else schema
    return lambda function: FunctionTool(function, name, given)


def function_schema(function: Callable[..., Any], name: str | None = None) -> Schema:
    """OpenAI function schema of a function. Raises ValueError, one line: what is missing, and where."""
    name = name or function.__name__
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"tool {name}: {parameter} cannot be called by name; a schema has named parameters only")
    # Before get_json_schema, which describes a hint that it does not know as an object.
    try:
        hints = get_type_hints(function)
    except Exception as error:  # hints may be text, which is evaluated
        raise ValueError(f"tool {name}: its type hints cannot be read: {' '.join(str(error).split())}") from error
    for parameter_name, hint in hints.items():
        if parameter_name != "return" and (unknown := _unknown(hint)) is not None:
            raise ValueError(
                f"tool {name}: the type of {parameter_name} has no JSON schema: {unknown}; use str, int, float, bool, list, "
                "dict, Literal or Optional of these"
            )
    try:
        schema = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise ValueError(f"tool {name}: {' '.join(map(str, error.args))}") from error
    # Not in OpenAI's schema; templates would show it to the model.
    schema["function"].pop("return", None)
    schema["function"]["name"] = name
    return schema


def _unknown(hint: Any) -> Any:
    """The part of a type hint that has no JSON schema; None if all of it has."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is None:
        return None if hint in _PLAIN else hint
    if origin is Literal:
        return None
    if origin in (Union, types.UnionType, list, tuple) or (origin is dict and not args):
        return next((part for part in map(_unknown, args) if part is not None), None)
    if origin is dict:
        return _unknown(args[1]) if args[0] is str else args[0]
    return hint


def output_of(value: Any) -> ToolOutput:
    """What a tool returned: text, a ToolResponse, anything else as JSON or text; or (this, reward[, metrics]), as in verl.

    Raises TypeError for another tuple, ValueError for a reward that is no finite number.
    """
    if not isinstance(value, tuple):
        return ToolOutput(_text(value))
    if not 1 <= len(value) <= 3:
        raise TypeError(f"a tool returns text, (text, reward) or (text, reward, metrics), not a tuple of {len(value)}")
    response, reward, metrics = (*value, None, None)[:3]
    number = 0.0 if reward is None else finite(reward)
    if number is None:
        raise ValueError(f"the reward is {reward!r:.60}, not a finite number")
    numbers = {str(name): finite(other) for name, other in (metrics or {}).items()}
    return ToolOutput(_text(response), number, {name: other for name, other in numbers.items() if other is not None})


def _text(value: Any) -> str:
    # By its fields: with verl installed its class is another one.
    if isinstance(value, BaseModel) and {"text", "image", "video"} <= (response := vars(value)).keys():
        if response["image"] or response["video"]:
            raise ValueError("the tool returned images or videos; only text is supported")
        value = response["text"] or ""
    if isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False, default=str)
    return value if isinstance(value, str) else str(value)


def _check(schema: Schema, *, closed: bool) -> Any:
    try:
        function = schema["function"]
        return validator(function.get("parameters", {"type": "object", "properties": {}}), closed=closed)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"tool_schema {json.dumps(schema, default=str):.200}: {error}") from error


class OpenAIFunctionPropertySchema(BaseModel):
    """Schema of a parameter. Other keys of JSON schemas are kept: the model sees what the user wrote."""

    model_config = ConfigDict(extra="allow")
    type: str | list[str]
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(BaseModel):
    """Schema of the parameters of a function."""

    model_config = ConfigDict(extra="allow")
    type: str
    properties: dict[str, OpenAIFunctionPropertySchema]
    required: list[str] = Field(default_factory=list)


def _no_parameters() -> OpenAIFunctionParametersSchema:
    return OpenAIFunctionParametersSchema(type="object", properties={}, required=[])


class OpenAIFunctionSchema(BaseModel):
    """Schema of a function."""

    name: str
    description: str
    parameters: OpenAIFunctionParametersSchema = Field(default_factory=_no_parameters)
    strict: bool = False


class OpenAIFunctionToolSchema(BaseModel):
    """Schema of a tool in OpenAI's chat completions."""

    type: str
    function: OpenAIFunctionSchema


class ToolResponse(BaseModel):
    """Response of a tool. Only text reaches the model: a response with images or videos is an error."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    def is_text_only(self) -> bool:
        return bool(self.text) and not self.image and not self.video


class BaseTool:
    """Base class of a tool with an instance per session; the methods and arguments are those of verl's.

    One object serves all sessions. Each session has a thread of its own: what sessions share needs a lock of ``threading``.
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        """tool_schema: of the YAML file; without it, get_openai_tool_schema gives one."""
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        if self.tool_schema is None:
            raise ValueError(f"{type(self).__name__}: no tool_schema in the YAML file; write one, or get_openai_tool_schema")
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Create the instance of a session. kwargs: ``create_kwargs`` of the data set's row."""
        assert instance_id is not None, "every session names its instance"
        return instance_id, ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> tuple[Any, float, dict[str, Any]]:
        """Run a call: (ToolResponse, reward, metrics)."""
        raise TypeError(f"{type(self).__name__} has no method execute")

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Reward of the session, at its end."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Release the instance."""


class StatefulTool:
    """A BaseTool, of this module or of verl, as a tool box uses it."""

    def __init__(self, base: Any) -> None:
        """base: object with the methods of BaseTool. Raises ValueError for a schema that is none."""
        self.base = base
        self.name: str = base.name
        self.schema: Schema = base.tool_schema.model_dump(exclude_unset=True, exclude_none=True)
        # Open, as in verl: such a tool gets its arguments as a dict and may use more than its schema shows.
        self.check = _check(self.schema, closed=False)

    async def create(self, session: str, kwargs: Mapping[str, Any]) -> str:
        """Create the session's instance; returns its id."""
        # Both ways in which versions of verl pass what the data set gives.
        given = accepted(self.base.create, {**kwargs, "create_kwargs": dict(kwargs)})
        created = await self.base.create(session, **given)
        return (created[0] if isinstance(created, tuple) else created) or session

    async def execute(self, instance: str, arguments: dict[str, Any], kwargs: Mapping[str, Any]) -> ToolOutput:
        return output_of(await self.base.execute(instance, arguments, **accepted(self.base.execute, kwargs)))

    async def calc_reward(self, instance: str, kwargs: Mapping[str, Any]) -> float:
        reward = await self.base.calc_reward(instance, **accepted(self.base.calc_reward, kwargs))
        number = finite(reward)
        if number is None:
            raise ValueError(f"the reward is {reward!r:.60}, not a finite number")
        return number

    async def release(self, instance: str, kwargs: Mapping[str, Any]) -> None:
        await self.base.release(instance, **accepted(self.base.release, kwargs))


def accepted(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the keyword arguments that the function takes."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(kwargs)
    return {name: value for name, value in kwargs.items() if name in parameters}


AnyTool = FunctionTool | StatefulTool
