"""OpenAI's chat completions: POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer.protocols.common import (
    Body,
    ChatCompletion,
    ChatRequest,
    Delta,
    Events,
    Fields,
    FunctionCall,
    Head,
    Message,
    SamplingOptions,
    arguments_in,
    call_message,
    check_log_prob,
    choices_in,
    content_text,
    event,
    function_schema,
    openai_error,
    openai_usage,
    seed_in,
    stops,
    temperature_in,
    tokens_in,
    tools_in,
    top_k_in,
    top_p_in,
    usage_of,
    wants_calls,
)

error = openai_error
THINKING = ("reasoning_content", "reasoning", "thinking")
"""Fields of a message with a model's thinking, by client."""
NO_EFFECT = ("user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")


def parse(body: Body) -> ChatRequest:
    """The request of a body. Raises BadRequest for anything wrong or not supported."""
    fields = Fields(body)
    model = fields.need("model", fields.text("model"))
    entries = fields.need("messages", fields.items("messages"))
    messages = [message_in(entry, f"messages[{i}]") for i, entry in enumerate(entries)]
    if not messages:
        raise fields.refuse("messages", "must not be empty")
    tools = tools_in(fields, _tool)
    calls = wants_calls(fields, fields.take("tool_choice"))
    most = [tokens_in(fields, "max_completion_tokens"), tokens_in(fields, "max_tokens")]
    if None not in most and most[0] != most[1]:
        raise fields.refuse("max_tokens", "differs from max_completion_tokens")
    sampling = SamplingOptions(
        temperature=temperature_in(fields),
        top_p=top_p_in(fields),
        top_k=top_k_in(fields),
        max_tokens=most[0] or most[1],
        seed=seed_in(fields),
        stop=stops(fields.take("stop"), "stop"),
        n=choices_in(fields),
    )
    request = ChatRequest(
        model=model,
        messages=messages,
        tools=tools if calls else None,
        sampling=sampling,
        stream=fields.flag("stream"),
        include_usage=include_usage(fields),
        logprobs=fields.flag("logprobs"),
        return_token_ids=fields.flag("return_token_ids"),
    )
    fields.only("top_logprobs", 0, why="log-probs of other tokens than the sampled one are not computed")
    fields.only("parallel_tool_calls", True, why="the model decides how many calls it makes")
    fields.only("response_format", {"type": "text"})
    fields.only("modalities", ["text"])
    fields.only("store", False, why="nothing is stored")
    for name in ("frequency_penalty", "presence_penalty"):
        fields.only(name, 0, 0.0, why="penalties are not supported")
    fields.ignore(*NO_EFFECT)
    fields.done()
    return request


def include_usage(fields: Fields) -> bool:
    options = Fields(fields.take("stream_options") or {}, "stream_options")
    usage = options.flag("include_usage")
    options.only("include_obfuscation", False)
    options.done()
    return usage


def message_in(entry: Any, path: str) -> Message:
    """A message in the form of ChatRequest.messages."""
    fields = Fields(entry, path)
    role = fields.need("role", fields.text("role"))
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise fields.refuse("role", f"{role!r:.40} is not system, developer, user, assistant or tool")
    content = fields.take("content")
    calls = fields.items("tool_calls") if role == "assistant" else None
    if content is None and role != "assistant":
        raise fields.refuse("content", "required")
    # Most templates know no «developer», and many write a null content as a word.
    message: Message = {"role": "system" if role == "developer" else role, "content": content_text(content, fields.at("content"))}
    if role == "assistant":
        thoughts = [thought for name in THINKING if (thought := fields.text(name))]
        if thoughts:
            message["reasoning_content"] = thoughts[0]
        if calls:
            message["tool_calls"] = [_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(calls)]
        fields.only("refusal", "")
    if role == "tool":
        message["tool_call_id"] = fields.need("tool_call_id", fields.text("tool_call_id"))
    if (name := fields.text("name")) is not None:
        message["name"] = name
    fields.done()
    return message


def _call(entry: Any, path: str) -> dict[str, Any]:
    fields = Fields(entry, path)
    fields.only("type", "function")
    id = fields.need("id", fields.text("id"))
    fields.ignore("index")  # of a call that was streamed
    function = Fields(fields.need("function", fields.take("function")), f"{path}.function")
    name = function.need("name", function.text("name"))
    arguments = arguments_in(function.need("arguments", function.take("arguments")), f"{path}.function.arguments")
    function.done()
    fields.done()
    return call_message(id, name, arguments)


def _tool(entry: Any, path: str) -> dict[str, Any]:
    fields = Fields(entry, path)
    kind = fields.text("type")
    if kind != "function":
        raise fields.refuse("type", f"{kind!r:.40} is not supported; use function")
    function = fields.need("function", fields.take("function"))
    fields.done()
    return function_schema(Fields(function, f"{path}.function"), "parameters")


def reply(request: ChatRequest, completions: Sequence[ChatCompletion], head: Head) -> Body:
    """Body of the reply; one choice for each completion."""
    choices = []
    for index, completion in enumerate(completions):
        choice: Body = {"index": index, "message": message_of(completion), "finish_reason": completion.finish_reason}
        choice["logprobs"] = log_probs_of(completion) if request.logprobs else None
        if request.return_token_ids:
            choice["token_ids"] = list(completion.token_ids)
        choices.append(choice)
    body = _head(head, "chat.completion") | {"choices": choices, "usage": openai_usage(*usage_of(completions, len(completions)))}
    return body | ({"prompt_token_ids": list(completions[0].prompt_token_ids)} if request.return_token_ids else {})


def message_of(completion: ChatCompletion) -> Message:
    """The assistant's message. content is null if there are calls only."""
    message: Message = {"role": "assistant", "content": completion.text or (None if completion.calls else "")}
    if completion.thinking:
        message["reasoning_content"] = completion.thinking
    if completion.calls:
        message["tool_calls"] = [_call_body(call) for call in completion.calls]
    return message


def _call_body(call: FunctionCall) -> Body:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_text}}


def log_probs_of(new: ChatCompletion | Delta) -> Body:
    """Log-probs of tokens in the form of chat completions."""
    return {"content": token_log_probs(new)}


def token_log_probs(new: ChatCompletion | Delta) -> list[Body]:
    return [
        {"token": token, "bytes": list(token.encode()), "logprob": check_log_prob(value), "top_logprobs": []}
        for token, value in zip(new.tokens, new.log_probs, strict=True)
    ]


def _head(head: Head, kind: str) -> Body:
    return {"id": f"chatcmpl-{head.id}", "object": kind, "created": head.created, "model": head.model}


class _ChatEvents:
    def __init__(self, request: ChatRequest, head: Head) -> None:
        self._request = request
        self._head = _head(head, "chat.completion.chunk")
        self._calls = [0] * request.sampling.n
        self._prompt_tokens = self._tokens = 0

    def _chunk(
        self, index: int, delta: Body, new: Delta | None = None, finish_reason: str | None = None, more: Body | None = None
    ) -> str:
        choice: Body = {"index": index, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
        if new is not None and self._request.logprobs:
            choice["logprobs"] = log_probs_of(new)
        if new is not None and self._request.return_token_ids:
            choice["token_ids"] = list(new.token_ids)
        return event(self._head | (more or {}) | {"choices": [choice]} | ({"usage": None} if self._request.include_usage else {}))

    def start(self, prompt_token_ids: Sequence[int]) -> str:
        self._prompt_tokens = len(prompt_token_ids)
        more = {"prompt_token_ids": list(prompt_token_ids)} if self._request.return_token_ids else {}
        first = {"role": "assistant", "content": ""}
        return "".join(self._chunk(index, first, more=more if index == 0 else {}) for index in range(self._request.sampling.n))

    def delta(self, delta: Delta) -> str:
        self._tokens += len(delta.token_ids)
        body: Body = {}
        if delta.thinking:
            body["reasoning_content"] = delta.thinking
        if delta.text:
            body["content"] = delta.text
        if delta.calls:
            first = self._calls[delta.index]
            self._calls[delta.index] += len(delta.calls)
            body["tool_calls"] = [{"index": first + i} | _call_body(call) for i, call in enumerate(delta.calls)]
        shows_tokens = delta.token_ids and (self._request.logprobs or self._request.return_token_ids)
        return self._chunk(delta.index, body, delta) if body or shows_tokens else ""

    def finish(self, index: int, completion: ChatCompletion) -> str:
        return self._chunk(index, {}, finish_reason=completion.finish_reason)

    def end(self) -> str:
        usage = self._head | {"choices": [], "usage": openai_usage(self._prompt_tokens, self._tokens)}
        return (event(usage) if self._request.include_usage else "") + event("[DONE]")

    def fail(self, status: int, message: str) -> str:
        return event(error(status, message))


def events(request: ChatRequest, head: Head) -> Events:
    """Encoder of a streamed reply."""
    return _ChatEvents(request, head)
