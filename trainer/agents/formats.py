"""Call formats: the tool calls in what a model wrote.

| name | a call |
|---|---|
| hermes, qwen3 | <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call> |
| qwen3_coder | <tool_call><function=add><parameter=a>1</parameter></function></tool_call>, each on a line of its own |
| llama3_json | {"name": "add", "parameters": {"a": 1}} is the whole response; further calls after «;» |
| pythonic | [add(a=1), add(a=2)] is the whole response |
| gpt-oss | a message to=functions.add of the harmony format, whose content is {"a": 1} |
| path/to/file.py:function | see own_format |

Nothing is guessed: a call is complete and correct, or it is malformed, and the model is informed. What follows a malformed call
is not searched for calls, because it may be part of the call: a file that the model writes may have examples of calls in it.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from trainer.agents.arguments import Schema, check_json, decode, from_text, unrepeated
from trainer.agents.isolation import described
from trainer.run.user_code import load_function

_KEY = "multi_turn.format"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool. arguments: not validated yet."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """Text that looks like a call and is none.

    kind: "json" (or "python": not in the language of the format), "fields" (without a name or arguments), "markup" (a tag is
    missing or wrong), "parser" (refused by the user's parser). error: one line for the model.
    """

    id: str
    kind: str
    error: str


@dataclass(frozen=True, slots=True)
class AssistantTurn:
    """A parsed response. before, after: text before the first call, and all other text outside of calls and thinking."""

    thinking: str
    before: str
    after: str
    calls: tuple[ToolCall | MalformedCall, ...]

    def message(self) -> dict[str, Any]:
        """The turn as a message of OpenAI's chat completions. The text of a malformed call is part of its content."""
        texts = [text for text in (self.before.strip(), self.after.strip()) if text]
        message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
        if self.thinking:
            message["reasoning_content"] = self.thinking.strip()
        calls = [call for call in self.calls if isinstance(call, ToolCall)]
        if calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function",
                 "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}}
                for call in calls
            ]  # fmt: skip
        return message

    def malformed(self) -> Counter[str]:
        """Number of malformed calls by kind."""
        return Counter(call.kind for call in self.calls if isinstance(call, MalformedCall))


class _Malformed(Exception):
    def __init__(self, kind: str, error: str) -> None:
        super().__init__(error)
        self.kind, self.error = kind, error


@dataclass(frozen=True, slots=True)
class _Thought:
    text: str


_Found = tuple[str, dict[str, Any]]
_Piece = str | _Thought | _Found
Format = Callable[[str, Sequence[Schema]], Iterator[_Piece]]
"""Splits a response into text, thinking and calls, in order; raises _Malformed after the text of the malformed call."""


def parse_turn(
    format: Format, text: str, tools: Sequence[Schema] = (), *, turn: int = 0, in_thinking: bool = False
) -> AssistantTurn:
    """Parse a response, without its stop token; never raises, whatever the text is.

    tools: OpenAI function schemas, by which plain text becomes values. turn: number of the response in its conversation, part of
    the calls' ids. in_thinking: the prompt ends within a thinking block.
    """
    texts, thoughts, calls = ["", ""], [], list[ToolCall | MalformedCall]()
    if in_thinking:
        thought, _, text = text.partition(_END_OF_THINKING)
        thoughts.append(thought)
    try:
        for piece in format(text, tools):
            if isinstance(piece, _Thought):
                thoughts.append(piece.text)
            elif isinstance(piece, str):
                texts[len(calls) > 0] += piece
            else:
                calls.append(ToolCall(f"call_{turn}_{len(calls)}", *piece))
    except _Malformed as error:
        calls.append(MalformedCall(f"call_{turn}_{len(calls)}", error.kind, error.error))
    return AssistantTurn("\n".join(thoughts), texts[0], texts[1], tuple(calls))


def opens_thinking(prompt: str) -> bool:
    """Whether a rendered prompt ends within a thinking block."""
    return prompt.rstrip().endswith(_THINKING)


_THINKING, _END_OF_THINKING = "<think>", "</think>"
_CALL, _END_OF_CALL = "<tool_call>", "</tool_call>"
_OPENED = re.compile(f"{_THINKING}|{_CALL}")
_LEADING_THINKING = re.compile(rf"\s*{_THINKING}(.*?)(?:{_END_OF_THINKING}\s*|\Z)", re.DOTALL)


def _in_tags(read: Callable[[str, int], tuple[_Found, int]], text: str) -> Iterator[_Piece]:
    """Calls in <tool_call> tags. read: the call from a position on, and the position of </tool_call>."""
    at = 0
    # From left to right: a tag within an argument is part of it, and one within a thinking block is thought about.
    while opened := _OPENED.search(text, at):
        yield text[at : opened.start()]
        if opened[0] == _THINKING:
            end = text.find(_END_OF_THINKING, opened.end())
            before = text[: opened.start()].rstrip(" \t")
            if end < 0 and before and not before.endswith(("\n", _END_OF_CALL, _END_OF_THINKING)):  # a word of a sentence
                yield opened[0]
                at = opened.end()
                continue
            yield _Thought(text[opened.end() : end if end >= 0 else None])
            at = end + len(_END_OF_THINKING) if end >= 0 else len(text)
            continue
        try:
            found, at = read(text, opened.end())
            if not text.startswith(_END_OF_CALL, at):
                raise _Malformed("markup", f"{_END_OF_CALL} must follow the call")
        except _Malformed:
            yield text[opened.start() :]
            raise
        at += len(_END_OF_CALL)
        yield found
    yield text[at:]


def _hermes(text: str, tools: Sequence[Schema]) -> Iterator[_Piece]:
    def read(text: str, at: int) -> tuple[_Found, int]:
        value, end = _json(text, at)
        return _fields(value, ["arguments"]), end

    return _in_tags(read, text)


def _json(text: str, at: int) -> tuple[Any, int]:
    try:
        return decode(text, at)
    except ValueError as error:
        raise _Malformed("json", f"the call is not JSON: {error}") from error


def _fields(value: Any, names: Sequence[str]) -> _Found:
    """names: those that the arguments may have."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise _Malformed("fields", f'a call is a JSON object with "name" and "{names[0]}"')
    for name in names:
        if isinstance(value.get(name), dict):
            return value["name"], value[name]
    raise _Malformed("fields", f'the call of {value["name"]!r:.60} needs "{names[0]}", a JSON object')


_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>\s*")
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>")
# A value may have </parameter> in it: only what follows says that it is the end.
_END_OF_VALUE = re.compile(r"</parameter>\s*(?=<parameter=[^<>\n]+>|</function>\s*</tool_call>)")
_END_OF_FUNCTION = re.compile(r"</function>\s*")


def _qwen3_coder(text: str, tools: Sequence[Schema]) -> Iterator[_Piece]:
    def read(text: str, at: int) -> tuple[_Found, int]:
        function = _expected(_FUNCTION, text, at, "<function=NAME> must follow <tool_call>")
        name, at = function[1].strip(), function.end()
        properties = _properties(name, tools)
        arguments: dict[str, Any] = {}
        while opened := _PARAMETER.match(text, at):
            parameter = opened[1].strip()
            closed = _END_OF_VALUE.search(text, opened.end())
            value = text[opened.end() : closed.start() if closed else None]
            if closed is None or _PARAMETER.search(value):
                raise _Malformed("markup", f"</parameter> must follow the value of {parameter!r:.60}")
            if parameter in arguments:
                raise _Malformed("fields", f"the call has the parameter {parameter!r:.60} twice")
            value = value.removeprefix("\n").removesuffix("\n")
            arguments[parameter] = from_text(value, properties.get(parameter, {}))
            at = closed.end()
        return (name, arguments), _expected(_END_OF_FUNCTION, text, at, "</function> must follow the parameters").end()

    return _in_tags(read, text)


def _expected(pattern: re.Pattern[str], text: str, at: int, error: str) -> re.Match[str]:
    if found := pattern.match(text, at):
        return found
    raise _Malformed("markup", error)


def _properties(name: str, tools: Sequence[Schema]) -> dict[str, Schema]:
    for tool in tools:
        if tool["function"]["name"] == name:
            parameters = _object(tool["function"].get("parameters"))
            shared: Schema = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
            properties = _object(parameters.get("properties"))
            return {key: shared | value for key, value in properties.items() if isinstance(value, dict)}
    return {}


def _object(value: Any) -> dict[str, Any]:
    """Some serialisers write an object without fields as [] or null."""
    return value if isinstance(value, dict) else {}


def _after_thinking(text: str) -> Iterator[_Thought | str]:
    """Thinking blocks at the start, then the text after them."""
    at = 0
    while block := _LEADING_THINKING.match(text, at):
        yield _Thought(block[1])
        at = block.end()
    yield text[at:]


_PYTHON_TAG = "<|python_tag|>"
_LOOKS_LIKE_JSON_CALL = re.compile(r'\{\s*"(?:name|type|parameters|arguments)"\s*:')


def _llama3_json(text: str, tools: Sequence[Schema]) -> Iterator[_Piece]:
    for piece in _after_thinking(text):
        if isinstance(piece, _Thought):
            yield piece
            continue
        body = piece.strip().removeprefix(_PYTHON_TAG).strip()
        if not body.startswith("{"):
            yield piece
            return
        try:
            found, at = [], 0
            while at < len(body):
                value, at = _json(body, at)
                found.append(_fields(value, ["parameters", "arguments"]))
                if at < len(body) and body[at] != ";":
                    raise _Malformed("markup", "a response with calls has nothing else, and «;» between calls")
                at += 1
        except _Malformed:
            yield piece
            # JSON may be the answer to a question: only an object that begins like a call is one.
            if _LOOKS_LIKE_JSON_CALL.match(body) and '"name"' in body and re.search(r'"(?:parameters|arguments)"', body):
                raise
            return
        yield from found


_LOOKS_LIKE_PYTHON_CALL = re.compile(r"\[\s*[A-Za-z_][\w.]*\(")


def _pythonic(text: str, tools: Sequence[Schema]) -> Iterator[_Piece]:
    for piece in _after_thinking(text):
        if isinstance(piece, _Thought) or not _LOOKS_LIKE_PYTHON_CALL.match(piece.strip()):
            yield piece
            continue
        try:
            found = _python_calls(piece.strip())
        except _Malformed:
            yield piece
            raise
        yield from found


def _python_calls(text: str) -> list[_Found]:
    try:
        tree = ast.parse(text, mode="eval").body
        # Compared with the text: a comment may follow a list.
        if not isinstance(tree, ast.List) or ast.get_source_segment(text, tree) != text:
            raise ValueError("a response with calls is one list of them")
        found = []
        for call in tree.elts:
            if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
                raise ValueError("a call is a name with keyword arguments")
            arguments = unrepeated([(str(keyword.arg), _literal(keyword.value)) for keyword in call.keywords])
            found.append((_dotted(call.func), check_json(arguments)))
        return found
    # What a model writes may be too deep for Python's parser, which raises any of these.
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error) or "it is nested too deeply"
        raise _Malformed("python", f"the calls are not a list of Python calls: {reason}") from error


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Name):
        return node.id
    raise ValueError("only tools can be called")


_NAMED = {"true": True, "false": False, "null": None}


def _literal(node: ast.expr) -> Any:
    """Value of a literal that JSON has too."""
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in _NAMED:
            return _NAMED[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)) if not isinstance(value, bool):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            names = [_literal(key) if key else None for key in keys]
            if all(isinstance(name, str) for name in names):
                return unrepeated([*zip(names, map(_literal, values), strict=True)])
    raise ValueError("arguments are text, numbers, True, False, None, lists, and dicts with text as keys")


_HEADER = re.compile(r"(?:<\|start\|>assistant)?([^<]*(?:<\|channel\|>[^<]*)?(?:<\|constrain\|>[^<]*)?)<\|message\|>")
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
_END_OF_MESSAGE = re.compile(r"<\|(?:end|call|return)\|>")


def _gpt_oss(text: str, tools: Sequence[Schema]) -> Iterator[_Piece]:
    at = 0
    while header := _HEADER.match(text, at):
        end = _END_OF_MESSAGE.search(text, header.end())
        body = text[header.end() : end.start() if end else len(text)]
        if recipient := _RECIPIENT.search(header[1]):
            try:
                value, read = _json(body, 0)
                if not isinstance(value, dict) or body[read:].strip():
                    raise _Malformed("fields", f"the content of a call of {recipient[1]!r:.60} is a JSON object")
            except _Malformed:
                yield text[at:]
                raise
            yield recipient[1], value
        else:
            yield _Thought(body) if "<|channel|>analysis" in header[1] else body
        at = end.end() if end else len(text)
    yield text[at:]


FORMATS: dict[str, Format] = {
    "hermes": _hermes,
    "qwen3": _hermes,
    "qwen3_coder": _qwen3_coder,
    "llama3_json": _llama3_json,
    "pythonic": _pythonic,
    "gpt-oss": _gpt_oss,
}


def call_format(name: str) -> Format:
    """The format of a name in FORMATS, or of a user's function: path/to/file.py:function. Raises ValueError, one line."""
    path, colon, function = name.rpartition(":")
    if colon:
        return own_format(load_function(path, function, f"{_KEY}={name}"))
    if name not in FORMATS:
        raise ValueError(f"{_KEY}={name}: no such format; use {', '.join(FORMATS)}, or path/to/file.py:function")
    return FORMATS[name]


def own_format(parse: Callable[[str, Sequence[Schema]], Any]) -> Format:
    """A format of the user's: parse(text, tools) -> (text outside of calls, [{"name": ..., "arguments": {...}}, ...]).

    It gets the text after the thinking block. An exception makes a malformed call, with the exception's text for the model.
    """

    def split(text: str, tools: Sequence[Schema]) -> Iterator[_Piece]:
        for piece in _after_thinking(text):
            if isinstance(piece, _Thought):
                yield piece
                continue
            try:
                content, calls = parse(piece, tools)
                found = [_fields(check_json(call), ["arguments"]) for call in calls]
                content = "" if content is None else str(content)
            except _Malformed as error:
                yield piece
                raise _Malformed("parser", error.error) from error
            except (Exception, SystemExit) as error:  # a user's function may raise anything
                yield piece
                raise _Malformed("parser", _reason(error)) from error
            yield content
            yield from found

    return split


def _reason(error: BaseException) -> str:
    """The text of a ValueError is written for the model; other exceptions are described."""
    if isinstance(error, ValueError):
        with suppress(Exception):  # of __str__, which the description names
            return " ".join(str(error).split())
    return described(error)
