"""Anthropic's messages: POST /v1/messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer.protocols.common import (
    BadRequest,
    Body,
    ChatCompletion,
    ChatRequest,
    Delta,
    Events,
    Fields,
    Head,
    Message,
    SamplingOptions,
    arguments_in,
    call_message,
    check_log_prob,
    content_text,
    event,
    function_schema,
    seed_in,
    stops,
    temperature_in,
    text_part,
    tokens_in,
    tools_in,
    top_k_in,
    top_p_in,
    usage_of,
)


def error(status: int, message: str, param: str | None = None) -> Body:
    """Body of an error."""
    kinds = {
        401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
        429: "rate_limit_error", 503: "overloaded_error",
    }  # fmt: skip
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def parse(body: Body) -> ChatRequest:
    """The request of a body. Raises BadRequest for anything wrong or not supported."""
    fields = Fields(body)
    model = fields.need("model", fields.text("model"))
    system = content_text(fields.take("system"), "system")
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    entries = fields.need("messages", fields.items("messages"))
    for i, entry in enumerate(entries):
        messages += _messages(Fields(entry, f"messages[{i}]"))
    if not messages[bool(system) :]:
        raise fields.refuse("messages", "must not be empty")
    tools = tools_in(fields, _tool)
    request = ChatRequest(
        model=model,
        messages=messages,
        tools=tools if _wants_calls(fields) else None,
        sampling=SamplingOptions(
            temperature=temperature_in(fields),
            top_p=top_p_in(fields),
            top_k=top_k_in(fields),
            max_tokens=fields.need("max_tokens", tokens_in(fields, "max_tokens")),
            seed=seed_in(fields),
            stop=stops(fields.take("stop_sequences"), "stop_sequences"),
        ),
        stream=fields.flag("stream"),
        return_token_ids=fields.flag("return_token_ids"),
    )
    fields.only("thinking", {"type": "disabled"}, why="the chat template decides whether the model thinks")
    fields.ignore("metadata", "service_tier")
    fields.done()
    return request


def _wants_calls(fields: Fields) -> bool:
    choice = Fields(fields.take("tool_choice") or {"type": "auto"}, "tool_choice")
    kind = choice.text("type")
    choice.only("disable_parallel_tool_use", False, why="the model decides how many calls it makes")
    choice.done()
    if kind not in ("auto", "none"):
        raise choice.refuse("type", f"{kind!r:.40} is not supported: the model decides; use auto or none")
    return kind == "auto"


def _tool(entry: Any, path: str) -> dict[str, Any]:
    fields = Fields(entry, path)
    fields.only("type", "custom", why="tools run at the client")
    fields.ignore("cache_control")
    return function_schema(fields, "input_schema")


def _messages(fields: Fields) -> list[Message]:
    """A message as messages of OpenAI's form: results of tools are messages of their own."""
    role = fields.need("role", fields.text("role"))
    if role not in ("user", "assistant"):
        raise fields.refuse("role", f"{role!r:.40} is not user or assistant; the prompt of the system is the field system")
    content, path = fields.need("content", fields.take("content")), fields.at("content")
    fields.done()
    if isinstance(content, str):
        return [{"role": role, "content": content_text(content, path)}]
    if not isinstance(content, list):
        raise BadRequest(f"{path}: must be a string or a list of blocks", path)
    blocks = [(block, f"{path}[{i}]") for i, block in enumerate(content)]
    return [_turn(blocks)] if role == "assistant" else _observed(blocks)


def _turn(blocks: list[tuple[Any, str]]) -> Message:
    """A turn of the assistant: thinking, text and calls."""
    texts, thoughts, calls = "", "", []
    for block, path in blocks:
        fields = Fields(block, path)
        match kind := fields.text("type"):
            case "text":
                texts += text_part(block, path)
            case "thinking":
                thoughts += fields.need("thinking", fields.text("thinking"))
                fields.ignore("signature")
                fields.done()
            case "tool_use":
                id, name = fields.need("id", fields.text("id")), fields.need("name", fields.text("name"))
                given = fields.need("input", fields.take("input"))
                calls.append(call_message(id, name, arguments_in(given, fields.at("input"))))
                fields.ignore("cache_control", "caller")
                fields.done()
            case _:
                raise fields.refuse("type", f"{kind!r:.40} is not supported; use text, thinking or tool_use")
    message: Message = {"role": "assistant", "content": texts}
    message |= {"reasoning_content": thoughts} if thoughts else {}
    return message | ({"tool_calls": calls} if calls else {})


def _observed(blocks: list[tuple[Any, str]]) -> list[Message]:
    """What the user and tools say, in order."""
    messages: list[Message] = []
    for block, path in blocks:
        fields = Fields(block, path)
        match kind := fields.text("type"):
            case "text":
                text = text_part(block, path)
                if messages and messages[-1]["role"] == "user":
                    messages[-1]["content"] += text
                else:
                    messages.append({"role": "user", "content": text})
            case "tool_result":
                id = fields.need("tool_use_id", fields.text("tool_use_id"))
                message = {"role": "tool", "content": content_text(fields.take("content"), fields.at("content"))}
                # Templates may use it; what went wrong is in the content.
                messages.append(message | {"tool_call_id": id} | ({"is_error": True} if fields.flag("is_error") else {}))
                fields.ignore("cache_control")
                fields.done()
            case _:
                raise fields.refuse("type", f"{kind!r:.40} is not supported: this model takes text")
    return messages


def reply(request: ChatRequest, completions: Sequence[ChatCompletion], head: Head) -> Body:
    """Body of the reply to one completion."""
    (completion,) = completions
    content: list[Body] = []
    if completion.thinking:
        content.append({"type": "thinking", "thinking": completion.thinking, "signature": ""})
    if completion.text or not completion.calls:
        content.append({"type": "text", "text": completion.text})
    content += [{"type": "tool_use", "id": c.id, "name": c.name, "input": c.arguments} for c in completion.calls]
    read, written = usage_of([completion], 1)
    body = _message(head) | {"content": content, "usage": {"input_tokens": read, "output_tokens": written}}
    return body | _ending(completion) | (_tokens(completion) if request.return_token_ids else {})


def _message(head: Head) -> Body:
    return {"id": f"msg_{head.id}", "type": "message", "role": "assistant", "model": head.model}


def _ending(completion: ChatCompletion) -> Body:
    reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    reason = reasons[completion.finish_reason] if completion.stop_sequence is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": completion.stop_sequence}


def _tokens(completion: ChatCompletion) -> Body:
    """Token ids and log-probs; no part of Anthropic's protocol."""
    return {
        "prompt_token_ids": list(completion.prompt_token_ids),
        "token_ids": list(completion.token_ids),
        "log_probs": [check_log_prob(value) for value in completion.log_probs],
    }


class _MessageEvents:
    """Blocks in the order of the reply; the block in progress ends where the next one begins."""

    def __init__(self, request: ChatRequest, head: Head) -> None:
        self._request, self._head = request, head
        self._blocks = 0
        self._open: str | None = None
        """Type of the block in progress."""

    def _event(self, name: str, /, **data: Any) -> str:
        return event({"type": name} | data, name)

    def start(self, prompt_token_ids: Sequence[int]) -> str:
        usage = {"input_tokens": len(prompt_token_ids), "output_tokens": 0}
        message = _message(self._head) | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return self._event("message_start", message=message)

    def _begin(self, block: Body) -> str:
        """Begin a block, unless it continues the text or thinking in progress."""
        if self._open == block["type"] != "tool_use":
            return ""
        closed = self._close()
        self._open = block["type"]
        return closed + self._event("content_block_start", index=self._blocks, content_block=block)

    def _close(self) -> str:
        if self._open is None:
            return ""
        self._open = None
        self._blocks += 1
        return self._event("content_block_stop", index=self._blocks - 1)

    def _delta(self, kind: str, name: str, text: str) -> str:
        return self._event("content_block_delta", index=self._blocks, delta={"type": kind, name: text})

    def delta(self, delta: Delta) -> str:
        out = ""
        if delta.thinking:
            out += self._begin({"type": "thinking", "thinking": "", "signature": ""})
            out += self._delta("thinking_delta", "thinking", delta.thinking)
        if delta.text:
            out += self._begin({"type": "text", "text": ""}) + self._delta("text_delta", "text", delta.text)
        for call in delta.calls:
            out += self._begin({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            out += self._delta("input_json_delta", "partial_json", call.arguments_text)
        return out

    def finish(self, index: int, completion: ChatCompletion) -> str:
        empty = "" if completion.text or completion.calls else self._begin({"type": "text", "text": ""})
        read, written = usage_of([completion], 1)
        usage = {"input_tokens": read, "output_tokens": written}
        more = _tokens(completion) if self._request.return_token_ids else {}
        ending = self._event("message_delta", delta=_ending(completion), usage=usage, **more)
        return empty + self._close() + ending

    def end(self) -> str:
        return self._event("message_stop")

    def fail(self, status: int, message: str) -> str:
        return event(error(status, message), "error")


def events(request: ChatRequest, head: Head) -> Events:
    """Encoder of a streamed reply."""
    return _MessageEvents(request, head)
