"""What the protocols of clients have in common: requests, completions, and the reading of untrusted JSON.

A protocol is a module with four functions: ``parse`` (body -> ChatRequest), ``reply`` (request and completions -> body),
``events`` (request -> encoder of server-sent events) and ``error`` (status and message -> body). They are pure: no HTTP, no
clock, no tokenizer. What a body asks for and a server cannot do is refused: a client must never believe that it was done.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Message = dict[str, Any]
Body = dict[str, Any]
FinishReason = Literal["stop", "length", "tool_calls"]
_MOST_STOPS, _MOST_CHOICES, _MOST_TOKENS = 16, 128, 1 << 31
_COLDEST = 0.01
_MOST_LEVELS = 50
"""Of nested values: templates and validators are recursive."""


class BadRequest(ValueError):
    """A request that is wrong or not supported: status 400. param: path of the field, None for the whole body."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How a request wants to be sampled; None: as the server is configured.

    temperature: 0 is greedy. max_tokens: of a response. stop: texts that end a response and are not part of it. n: responses to
    each prompt.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request, independent of its protocol.

    messages: in the form of OpenAI's chat completions, with the arguments of calls as dicts, texts as content, and thinking as
    reasoning_content. tools: function schemas of OpenAI's chat completions; None: no calls. prompts: of a completion without
    messages, texts or token ids. include_usage: a stream ends with the numbers of tokens. logprobs: of each token.
    return_token_ids: of prompt and response.
    """

    model: str
    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    prompts: tuple[str | tuple[int, ...], ...] = ()
    sampling: SamplingOptions = SamplingOptions()
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    return_token_ids: bool = False


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A call of a tool. arguments: a JSON object."""

    id: str
    name: str
    arguments: dict[str, Any]

    @property
    def arguments_text(self) -> str:
        return json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class ChatCompletion:
    """A response to a prompt.

    text: without thinking and calls. stop_sequence: the text of SamplingOptions.stop that ended it. token_ids: with the stop
    token; tokens: the text of each, needed if the request has logprobs.
    """

    text: str
    finish_reason: FinishReason
    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    log_probs: Sequence[float]
    tokens: Sequence[str] = ()
    thinking: str = ""
    calls: tuple[FunctionCall, ...] = ()
    stop_sequence: str | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new of a response that is streamed. index: of the response. calls: complete ones. Others as in ChatCompletion."""

    index: int = 0
    text: str = ""
    thinking: str = ""
    calls: tuple[FunctionCall, ...] = ()
    token_ids: Sequence[int] = ()
    log_probs: Sequence[float] = ()
    tokens: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Head:
    """What identifies a reply. id: without the prefix of the protocol. created: seconds since 1970."""

    id: str
    created: int
    model: str


class Events(Protocol):
    """Encoder of a streamed reply: each method returns the server-sent events of what is new, as text.

    Calls in this order: ``start``; ``delta`` any number of times and ``finish`` once for each response; ``end``. ``fail`` ends
    the stream instead of the rest.
    """

    def start(self, prompt_token_ids: Sequence[int]) -> str: ...

    def delta(self, delta: Delta) -> str: ...

    def finish(self, index: int, completion: ChatCompletion) -> str: ...

    def end(self) -> str: ...

    def fail(self, status: int, message: str) -> str: ...


def event(data: Any, name: str | None = None) -> str:
    """A server-sent event with JSON."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n" if name is None else f"event: {name}\ndata: {text}\n\n"


def usage_of(completions: Sequence[ChatCompletion], n: int) -> tuple[int, int]:
    """Tokens of prompts and responses. n: responses to each prompt, which is counted once."""
    prompts = sum(len(completion.prompt_token_ids) for completion in completions[::n])
    return prompts, sum(len(completion.token_ids) for completion in completions)


def openai_usage(prompt_tokens: int, completion_tokens: int) -> Body:
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


def openai_error(status: int, message: str, param: str | None = None) -> Body:
    """Body of an error of OpenAI's protocols."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    codes = {401: "invalid_api_key", 404: "model_not_found" if param == "model" else None, 429: "rate_limit_exceeded"}
    return {"error": {"message": message, "type": kind, "param": param, "code": codes.get(status)}}


def decode_body(raw: bytes) -> Body:
    """The JSON object of a request. Raises BadRequest."""
    try:
        body = json.loads(raw)
    except RecursionError as error:
        raise BadRequest("the body is nested too deeply") from error
    except ValueError as error:  # no JSON, no UTF-8, or a number with too many digits
        raise BadRequest(f"the body is not JSON: {' '.join(str(error).split())}") from error
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


class Fields:
    """The fields of a JSON object, read one by one; ``done`` refuses those that were not read. Null is the same as absent."""

    def __init__(self, value: Any, path: str = "") -> None:
        """path: of the object in the body, for messages. Raises BadRequest if the value is no object."""
        if not isinstance(value, Mapping):
            raise BadRequest(f"{path or 'the body'} must be an object", path or None)
        self._left = {name: item for name, item in value.items() if item is not None}
        self._path = path

    def at(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def take(self, name: str) -> Any:
        """The value, of any type; None if absent."""
        return self._left.pop(name, None)

    def refuse(self, name: str, problem: str) -> BadRequest:
        return BadRequest(f"{self.at(name)}: {problem}", self.at(name))

    def need(self, name: str, value: Any) -> Any:
        if value is None:
            raise self.refuse(name, "required")
        return value

    def text(self, name: str) -> str | None:
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            raise self.refuse(name, "must be a string")
        return None if value is None else unicode_text(value, self.at(name))

    def number(self, name: str, low: float, high: float) -> float | None:
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:  # NaN is in no range
            raise self.refuse(name, f"must be a number from {low:g} to {high:g}")
        return float(value)

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self.take(name)
        if value is None:
            return None
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole or not low <= value <= high:
            raise self.refuse(name, f"must be an integer from {low} to {high}")
        return int(value)

    def flag(self, name: str) -> bool:
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise self.refuse(name, "must be true or false")
        return bool(value)

    def items(self, name: str) -> list[Any] | None:
        value = self.take(name)
        if value is not None and not isinstance(value, list):
            raise self.refuse(name, "must be a list")
        return value

    def ignore(self, *names: str) -> None:
        """Fields that say nothing about the response."""
        for name in names:
            self.take(name)

    def only(self, name: str, *allowed: Any, why: str = "not supported") -> None:
        """A field of which only values that change nothing are supported."""
        value = self.take(name)
        if value is not None and not any(type(value) is type(one) and value == one for one in allowed):
            raise self.refuse(name, f"{why}; use {' or '.join(map(json.dumps, allowed))}" if allowed else why)

    def done(self) -> None:
        """Refuse what was not read. Empty lists and objects ask for nothing."""
        for name, value in self._left.items():
            if value not in ([], {}):
                raise self.refuse(str(name), "not supported")


def unicode_text(value: str, path: str) -> str:
    """The text. Raises BadRequest for half of a surrogate pair, which no tokenizer takes."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(f"{path}: a character is no Unicode text", path) from error
    return value


def check_levels(value: Any, path: str) -> None:
    """Raise BadRequest for a value with more than 50 levels: what handles values, such as pickle, is recursive."""
    level = [value]
    for _ in range(_MOST_LEVELS):
        level = [item for parent in level if isinstance(parent, dict | list) for item in _items_of(parent)]
    if level:
        raise BadRequest(f"{path}: nested too deeply", path)


def json_value(value: Any, path: str) -> Any:
    """The value. Raises BadRequest for what is no JSON (NaN, half of a surrogate pair), or nested too deeply."""
    check_levels(value, path)
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        raise BadRequest(f"{path}: not JSON in UTF-8", path) from error
    return value


def _items_of(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value


def content_text(value: Any, path: str, types: Sequence[str] = ("text",)) -> str:
    """Text of a content: a string, or a list of parts of these types, which are joined. Raises BadRequest for other parts."""
    if value is None:
        return ""
    if isinstance(value, str):
        return unicode_text(value, path)
    if not isinstance(value, list):
        raise BadRequest(f"{path}: must be a string or a list of parts", path)
    return "".join(text_part(part, f"{path}[{i}]", types) for i, part in enumerate(value))


def text_part(part: Any, path: str, types: Sequence[str] = ("text",)) -> str:
    fields = Fields(part, path)
    if (kind := fields.text("type")) not in types:
        raise fields.refuse("type", f"{kind!r:.40} is not supported: this model takes text; use {' or '.join(types)}")
    text = fields.need("text", fields.text("text"))
    fields.ignore("annotations", "logprobs", "cache_control")
    fields.done()
    return text


def stops(value: Any, path: str) -> tuple[str, ...]:
    """Stop texts: a string or a list."""
    if value is None:
        return ()
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or len(texts) > _MOST_STOPS or not all(isinstance(text, str) and text for text in texts):
        raise BadRequest(f"{path}: must be a string or at most {_MOST_STOPS} strings, none empty", path)
    return tuple(unicode_text(text, path) for text in texts)


def temperature_in(fields: Fields) -> float | None:
    temperature = fields.number("temperature", 0.0, 2.0)
    # Logits divided by less are not finite in low precision.
    if temperature is not None and 0.0 < temperature < _COLDEST:
        raise fields.refuse("temperature", f"must be 0 (greedy) or from {_COLDEST} to 2")
    return temperature


def seed_in(fields: Fields) -> int | None:
    return fields.integer("seed", -(1 << 63), (1 << 63) - 1)


def tokens_in(fields: Fields, name: str) -> int | None:
    return fields.integer(name, 1, _MOST_TOKENS)


def choices_in(fields: Fields) -> int:
    return fields.integer("n", 1, _MOST_CHOICES) or 1


def top_k_in(fields: Fields) -> int | None:
    """-1 and 0, of vLLM, keep all tokens."""
    top_k = fields.integer("top_k", -1, _MOST_TOKENS)
    return -1 if top_k == 0 else top_k


def top_p_in(fields: Fields) -> float | None:
    top_p = fields.number("top_p", 0.0, 1.0)
    if top_p == 0.0:
        raise fields.refuse("top_p", "must be more than 0")
    return top_p


def function_schema(fields: Fields, parameters: str) -> dict[str, Any]:
    """Function schema of OpenAI's chat completions, of an object that has name, description and the parameters' schema."""
    name = fields.need("name", fields.text("name"))
    function: dict[str, Any] = {"name": name}
    if (description := fields.text("description")) is not None:
        function["description"] = description
    schema = fields.take(parameters)
    if schema is not None:
        if not isinstance(schema, dict):
            raise fields.refuse(parameters, "must be an object")
        function["parameters"] = json_value(schema, fields.at(parameters))
    fields.flag("strict")  # arguments are those that the model writes; clients set it by default
    fields.done()
    if not name:
        raise fields.refuse("name", "must not be empty")
    return {"type": "function", "function": function}


def tools_in(fields: Fields, read: Callable[[Any, str], dict[str, Any]]) -> list[dict[str, Any]] | None:
    """The tools of a request; none of an empty list. read: schema of an entry, given its path."""
    entries = fields.items("tools")
    tools = [read(entry, f"{fields.at('tools')}[{i}]") for i, entry in enumerate(entries or ())]
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise fields.refuse("tools", "two tools have one name")
    return tools or None


def arguments_in(value: Any, path: str) -> dict[str, Any]:
    """Arguments of a call as a dict: JSON text, or an object."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else {}
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"{path}: not JSON", path) from error
    if not isinstance(value, dict):
        raise BadRequest(f"{path}: must be a JSON object", path)
    json_value(value, path)
    return value


def call_message(id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Entry of tool_calls of a parsed message."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def wants_calls(fields: Fields, choice: Any) -> bool:
    """Whether tools may be called. choice: tool_choice of OpenAI's protocols."""
    if choice in (None, "auto"):
        return True
    if choice == "none":
        return False
    raise fields.refuse("tool_choice", 'not supported: the model decides; use "auto" or "none"')


def check_log_prob(value: float) -> float:
    """JSON has no infinity; OpenAI's servers write -9999 for a token of probability 0."""
    return value if math.isfinite(value) else -9999.0
