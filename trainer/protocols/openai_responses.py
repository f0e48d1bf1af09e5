"""OpenAI's responses: POST /v1/responses. Nothing is stored: every request has the whole conversation."""

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
    content_text,
    event,
    function_schema,
    openai_error,
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
from trainer.protocols.openai_chat import NO_EFFECT, token_log_probs

error = openai_error
_TEXTS = ("input_text", "output_text", "text")


def parse(body: Body) -> ChatRequest:
    """The request of a body. Raises BadRequest for anything wrong or not supported."""
    fields = Fields(body)
    model = fields.need("model", fields.text("model"))
    instructions = fields.text("instructions")
    messages: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    messages += _messages(fields, fields.need("input", fields.take("input")))
    tools = tools_in(fields, _tool)
    calls = wants_calls(fields, fields.take("tool_choice"))
    include = fields.items("include") or []
    if any(name != "message.output_text.logprobs" for name in include):
        raise fields.refuse("include", "only message.output_text.logprobs is supported")
    request = ChatRequest(
        model=model,
        messages=messages,
        tools=tools if calls else None,
        sampling=SamplingOptions(
            temperature=temperature_in(fields),
            top_p=top_p_in(fields),
            top_k=top_k_in(fields),
            max_tokens=tokens_in(fields, "max_output_tokens"),
            seed=seed_in(fields),
            stop=stops(fields.take("stop"), "stop"),
        ),
        stream=fields.flag("stream"),
        logprobs=bool(include),
        return_token_ids=fields.flag("return_token_ids"),
    )
    fields.only("top_logprobs", 0, why="log-probs of other tokens than the sampled one are not computed")
    fields.only("parallel_tool_calls", True, why="the model decides how many calls it makes")
    fields.only("text", {"format": {"type": "text"}})
    fields.only("truncation", "disabled", why="nothing is removed from a conversation")
    fields.only("store", False, why="nothing is stored")
    fields.only("background", False)
    fields.only("previous_response_id", why="nothing is stored; send the whole conversation as input")
    options = Fields(fields.take("stream_options") or {}, "stream_options")
    options.only("include_obfuscation", False)
    options.done()
    fields.ignore(*NO_EFFECT)
    fields.done()
    return request


def _tool(entry: Any, path: str) -> dict[str, Any]:
    fields = Fields(entry, path)
    if (kind := fields.text("type")) != "function":
        raise fields.refuse("type", f"{kind!r:.40} is not supported: tools run at the client; use function")
    return function_schema(fields, "parameters")


def _messages(fields: Fields, value: Any) -> list[Message]:
    if isinstance(value, str):
        return [{"role": "user", "content": content_text(value, "input")}]
    if not isinstance(value, list) or not value:
        raise fields.refuse("input", "must be a text or a list of items, not empty")
    messages: list[Message] = []
    for i, entry in enumerate(value):
        _add(messages, Fields(entry, f"input[{i}]"))
    return messages


def _add(messages: list[Message], item: Fields) -> None:
    """Add an item to the conversation. Reasoning, text and calls of a turn are items of their own, and one message."""
    kind = item.text("type") or "message"
    item.ignore("id", "status")
    match kind:
        case "message":
            role = item.need("role", item.text("role"))
            if role not in ("system", "developer", "user", "assistant"):
                raise item.refuse("role", f"{role!r:.40} is not system, developer, user or assistant")
            content = content_text(item.need("content", item.take("content")), item.at("content"), _TEXTS)
            if role != "assistant":
                messages.append({"role": "system" if role == "developer" else role, "content": content})
            else:
                turn = _turn(messages, begins=lambda last: bool(last["content"]) or "tool_calls" in last)
                turn["content"] = content
        case "reasoning":
            parts = [*(item.items("content") or ()), *(item.items("summary") or ())]
            thinking = content_text(parts, item.at("content"), ("reasoning_text", "summary_text"))
            item.ignore("encrypted_content")
            messages.append({"role": "assistant", "content": ""} | ({"reasoning_content": thinking} if thinking else {}))
        case "function_call":
            turn = _turn(messages, begins=lambda last: False)
            id, name = item.need("call_id", item.text("call_id")), item.need("name", item.text("name"))
            arguments = arguments_in(item.need("arguments", item.take("arguments")), item.at("arguments"))
            item.ignore("parsed_arguments")  # of streams of OpenAI's SDK: the same arguments
            turn.setdefault("tool_calls", []).append(call_message(id, name, arguments))
        case "function_call_output":
            id = item.need("call_id", item.text("call_id"))
            output = content_text(item.need("output", item.take("output")), item.at("output"), _TEXTS)
            messages.append({"role": "tool", "content": output, "tool_call_id": id})
        case _:
            raise item.refuse("type", f"{kind!r:.40} is not supported")
    item.done()


def _turn(messages: list[Message], *, begins: Any) -> Message:
    """The assistant's turn that an item belongs to. begins: whether it begins another one than the last message."""
    if not messages or messages[-1]["role"] != "assistant" or begins(messages[-1]):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def reply(request: ChatRequest, completions: Sequence[ChatCompletion], head: Head) -> Body:
    """Body of the reply to one completion."""
    (completion,) = completions
    return _response(request, head, completion, _output(request, completion, head))


def _response(request: ChatRequest, head: Head, completion: ChatCompletion | None, output: list[Body]) -> Body:
    """The response object. completion: None while it is in progress."""
    truncated = completion is not None and completion.finish_reason == "length"
    status = "in_progress" if completion is None else "incomplete" if truncated else "completed"
    body: Body = {
        "id": f"resp_{head.id}",
        "object": "response",
        "created_at": head.created,
        "model": head.model,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if truncated else None,
        "instructions": None,
        "metadata": {},
        "output": output,
        "parallel_tool_calls": True,
        "temperature": request.sampling.temperature,
        "top_p": request.sampling.top_p,
        "max_output_tokens": request.sampling.max_tokens,
        "tool_choice": "auto" if request.tools else "none",
        "tools": [{"type": "function", "strict": False} | tool["function"] for tool in request.tools or ()],
        "usage": None,
    }
    if completion is not None:
        read, written = usage_of([completion], 1)
        body["usage"] = {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + written,
        }
        if request.return_token_ids:
            body["prompt_token_ids"] = list(completion.prompt_token_ids)
            body["token_ids"] = list(completion.token_ids)
    return body


def _output(request: ChatRequest, completion: ChatCompletion, head: Head) -> list[Body]:
    """Items of a complete response: thinking, text, calls."""
    items = []
    if completion.thinking:
        items.append(_reasoning(f"rs_{head.id}", completion.thinking))
    if completion.text or not completion.calls:
        items.append(_message(f"msg_{head.id}", completion.text, token_log_probs(completion) if request.logprobs else []))
    return items + [_call(head, i, call) for i, call in enumerate(completion.calls)]


def _reasoning(id: str, text: str | None) -> Body:
    """text: None while it is in progress."""
    content = [] if text is None else [{"type": "reasoning_text", "text": text}]
    status = "in_progress" if text is None else "completed"
    return {"id": id, "type": "reasoning", "status": status, "summary": [], "content": content}


def _message(id: str, text: str | None, log_probs: list[Body]) -> Body:
    """text: None while it is in progress."""
    status = "in_progress" if text is None else "completed"
    content = [] if text is None else [_text_part(text, log_probs)]
    return {"id": id, "type": "message", "role": "assistant", "status": status, "content": content}


def _text_part(text: str, log_probs: list[Body]) -> Body:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": log_probs}


def _call(head: Head, number: int, call: FunctionCall, arguments: str | None = None) -> Body:
    """arguments: instead of those of the call, while it is in progress."""
    return {
        "id": f"fc_{head.id}_{number}",
        "type": "function_call",
        "status": "completed" if arguments is None else "in_progress",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments_text if arguments is None else arguments,
    }


class _ResponseEvents:
    """Items in the order of ``_output``; the item in progress ends where the next one begins."""

    def __init__(self, request: ChatRequest, head: Head) -> None:
        self._request, self._head = request, head
        self._number = self._calls = 0
        self._output: list[Body] = []
        self._open: tuple[str, str] | None = None
        """Type and text so far of the item in progress."""
        self._log_probs: list[Body] = []
        self._completion: ChatCompletion | None = None

    def _event(self, name: str, /, **data: Any) -> str:
        self._number += 1
        return event({"type": name, "sequence_number": self._number - 1} | data, name)

    def _response(self, name: str) -> str:
        return self._event(name, response=_response(self._request, self._head, self._completion, self._output))

    def start(self, prompt_token_ids: Sequence[int]) -> str:
        return self._response("response.created") + self._response("response.in_progress")

    def _place(self, id: str, part: int | None = 0) -> Body:
        """Where an event belongs. part: of the item's content; None: the item."""
        return {"output_index": len(self._output), "item_id": id} | ({} if part is None else {"content_index": part})

    def _write(self, kind: str, text: str, log_probs: list[Body]) -> str:
        """Text of an item that is opened if it is not in progress. kind: reasoning or message."""
        out = ""
        if self._open is None or self._open[0] != kind:
            out += self._close()
            id = self._item_id(kind)
            item = _reasoning(id, None) if kind == "reasoning" else _message(id, None, [])
            out += self._event("response.output_item.added", output_index=len(self._output), item=item)
            part = {"type": "reasoning_text", "text": ""} if kind == "reasoning" else _text_part("", [])
            out += self._event("response.content_part.added", **self._place(item["id"]), part=part)
            self._open = kind, ""
        self._open = kind, self._open[1] + text
        name = "response.reasoning_text.delta" if kind == "reasoning" else "response.output_text.delta"
        more = {} if kind == "reasoning" else {"logprobs": log_probs}
        return out + (self._event(name, **self._place(self._item_id(kind)), delta=text, **more) if text else "")

    def _item_id(self, kind: str) -> str:
        """A model that thinks after it has written text has a second message behind it."""
        before = sum(item["type"] == kind for item in self._output)
        return f"{'rs' if kind == 'reasoning' else 'msg'}_{self._head.id}{f'_{before}' if before else ''}"

    def _close(self) -> str:
        """End the item in progress."""
        if self._open is None:
            return ""
        (kind, text), self._open = self._open, None
        id, log_probs = self._item_id(kind), self._log_probs
        item = _reasoning(id, text) if kind == "reasoning" else _message(id, text, log_probs)
        place = self._place(item["id"])
        if kind == "reasoning":
            out = self._event("response.reasoning_text.done", **place, text=text)
        else:
            out = self._event("response.output_text.done", **place, text=text, logprobs=log_probs)
            self._log_probs = []
        out += self._event("response.content_part.done", **place, part=item["content"][0])
        out += self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        return out

    def delta(self, delta: Delta) -> str:
        out = self._write("reasoning", delta.thinking, []) if delta.thinking else ""
        log_probs = token_log_probs(delta) if self._request.logprobs else []
        self._log_probs += log_probs
        if delta.text:
            out += self._write("message", delta.text, log_probs)
        for call in delta.calls:
            out += self._close()
            begun, item = (_call(self._head, self._calls, call, arguments) for arguments in ("", None))
            place = self._place(item["id"], None)
            out += self._event("response.output_item.added", output_index=len(self._output), item=begun)
            out += self._event("response.function_call_arguments.delta", **place, delta=item["arguments"])
            out += self._event("response.function_call_arguments.done", **place, name=call.name, arguments=item["arguments"])
            out += self._event("response.output_item.done", output_index=len(self._output), item=item)
            self._output.append(item)
            self._calls += 1
        return out

    def finish(self, index: int, completion: ChatCompletion) -> str:
        self._completion = completion
        # A response without text and calls has an empty message.
        is_empty = not completion.calls and not any(item["type"] == "message" for item in self._output) and self._open is None
        thinks = self._open is not None and self._open[0] == "reasoning"
        return (self._write("message", "", []) if is_empty or (thinks and not completion.calls) else "") + self._close()

    def end(self) -> str:
        assert self._completion is not None, "the response has finished"
        truncated = self._completion.finish_reason == "length"
        return self._response("response.incomplete" if truncated else "response.completed")

    def fail(self, status: int, message: str) -> str:
        return self._event("error", code=str(status), message=message, param=None)


def events(request: ChatRequest, head: Head) -> Events:
    """Encoder of a streamed reply."""
    return _ResponseEvents(request, head)
