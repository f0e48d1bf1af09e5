"""Anthropic's messages: parsing, replies, streams."""

from importlib import import_module
from typing import Any

import pytest

from tests.trainer.protocols.streams import CALLS, HEAD, completion, stream
from trainer.protocols import anthropic_messages
from trainer.protocols.common import BadRequest

TOOL = {"name": "add", "description": "Add.", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}
USER = {"role": "user", "content": "hi"}


def parse(**changes: Any) -> Any:
    return anthropic_messages.parse({"model": "m", "max_tokens": 64, "messages": [USER]} | changes)


def test_blocks_become_messages() -> None:
    used = {"type": "tool_use", "id": "t", "name": "add", "input": {"a": 1}}
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    request = parse(
        system=[{"type": "text", "text": "be brief"}],
        tools=[TOOL],
        messages=[
            USER,
            {"role": "assistant", "content": [thought, {"type": "text", "text": "see"}, used]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "no"}], "is_error": True},
                    {"type": "text", "text": "a"},
                    {"type": "text", "text": "b"},
                ],
            },
        ],
    )  # fmt: skip
    call = {"id": "t", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert request.messages == [
        {"role": "system", "content": "be brief"},
        USER,
        {"role": "assistant", "content": "see", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "no", "tool_call_id": "t", "is_error": True},
        {"role": "user", "content": "ab"},
    ]
    assert request.tools == [
        {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
    ]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": []}]}, "messages"),
        ({"messages": [], "system": "x"}, "messages"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "content": [{"type": "redacted"}]}]}, "messages[0].content[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "tool_choice.disable_parallel_tool_use"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
    ],
)  # fmt: skip
def test_what_is_wrong_or_not_supported_is_refused_by_name(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        parse(**changes)
    assert refused.value.param == param


def test_an_empty_system_prompt_is_none_and_stop_sequences_are_stops() -> None:
    request = parse(system="", stop_sequences=["END"], tool_choice={"type": "none"}, tools=[TOOL])
    assert (request.messages, request.sampling.stop, request.tools) == ([USER], ("END",), None)


def test_a_reply_names_the_reason_for_its_end() -> None:
    def ending(**changes: Any) -> Any:
        reply = anthropic_messages.reply(parse(), [completion(**changes)], HEAD)
        return reply["stop_reason"], reply["stop_sequence"], [block["type"] for block in reply["content"]]

    assert ending() == ("end_turn", None, ["text"])
    assert ending(finish_reason="length") == ("max_tokens", None, ["text"])
    assert ending(stop_sequence="END") == ("stop_sequence", "END", ["text"])
    assert ending(text="", thinking="hm", calls=CALLS, finish_reason="tool_calls") == (
        "tool_use", None, ["thinking", "tool_use", "tool_use"],
    )  # fmt: skip


def test_the_content_of_a_reply_is_accepted_in_the_next_request() -> None:
    turn = completion(thinking="hm", calls=CALLS, finish_reason="tool_calls")
    content = anthropic_messages.reply(parse(), [turn], HEAD)["content"]
    (_, again) = parse(messages=[USER, {"role": "assistant", "content": content}]).messages
    assert (again["content"], again["reasoning_content"]) == (turn.text, "hm")
    assert [call["function"]["arguments"] for call in again["tool_calls"]] == [{"a": 1, "b": "é"}, {}]


def test_events_of_a_stream_are_in_the_order_of_the_protocol() -> None:
    turn = completion(thinking="hm", calls=CALLS, finish_reason="tool_calls")
    events = stream(anthropic_messages.events(parse(stream=True, tools=[TOOL], return_token_ids=True), HEAD), turn)
    assert [kind for kind, _ in events] == [data["type"] for _, data in events]
    assert [kind for kind, _ in events] == [
        "message_start",
        "content_block_start", "content_block_delta", "content_block_stop",
        "content_block_start", "content_block_delta", "content_block_delta", "content_block_stop",
        *["content_block_start", "content_block_delta", "content_block_stop"] * 2,
        "message_delta", "message_stop",
    ]  # fmt: skip
    blocks = [data for kind, data in events if kind == "content_block_start"]
    assert [data["index"] for data in blocks] == [0, 1, 2, 3]
    assert [data["content_block"]["type"] for data in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    deltas = [data["delta"] for kind, data in events if kind == "content_block_delta"]
    assert "".join(delta.get("text", "") for delta in deltas) == turn.text
    assert deltas[-2]["partial_json"] == '{"a": 1, "b": "é"}'
    assert events[0][1]["message"]["usage"]["input_tokens"] == 3
    assert events[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert (events[-2][1]["token_ids"], events[-2][1]["log_probs"]) == ([7, 8], [-0.5, -1.0])


def test_a_stream_without_text_has_an_empty_block() -> None:
    events = stream(anthropic_messages.events(parse(stream=True), HEAD), completion(text=""))
    assert [kind for kind, _ in events] == [
        "message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip


def test_replies_and_events_are_those_of_the_sdk() -> None:
    types = import_module("anthropic.types")
    from pydantic import TypeAdapter

    turn = completion(thinking="hm", calls=CALLS, finish_reason="tool_calls")
    types.Message.model_validate(anthropic_messages.reply(parse(), [turn], HEAD), strict=True)
    for _, data in stream(anthropic_messages.events(parse(stream=True), HEAD), turn):
        TypeAdapter(types.RawMessageStreamEvent).validate_python(data)


def test_an_error_has_anthropics_body() -> None:
    assert anthropic_messages.error(429, "later") == {
        "type": "error", "error": {"type": "rate_limit_error", "message": "later"},
    }  # fmt: skip
