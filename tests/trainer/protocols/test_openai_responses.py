"""OpenAI's responses: parsing, replies, streams."""

from importlib import import_module
from typing import Any

import pytest

from tests.trainer.protocols.streams import CALLS, HEAD, completion, read, stream
from trainer.protocols import openai_responses
from trainer.protocols.common import BadRequest, Delta

TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}


def parse(**changes: Any) -> Any:
    return openai_responses.parse({"model": "m", "input": "hi"} | changes)


def test_items_of_a_turn_are_one_message() -> None:
    request = parse(
        instructions="be brief",
        tools=[TOOL],
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "1 + 2"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "see", "annotations": []}]},
            {
                "type": "function_call",
                "id": "fc_1",
                "call_id": "c",
                "name": "add",
                "arguments": '{"a": 1}',
                "status": "completed",
            },
            {"type": "function_call", "call_id": "d", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "3"},
            {"type": "function_call_output", "call_id": "d", "output": "4"},
            {"role": "assistant", "content": "3"},
        ],
    )
    calls = [
        {"id": id, "type": "function", "function": {"name": "add", "arguments": arguments}}
        for id, arguments in [("c", {"a": 1}), ("d", {})]
    ]
    assert request.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "1 + 2"},
        {"role": "assistant", "content": "see", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "content": "3", "tool_call_id": "c"},
        {"role": "tool", "content": "4", "tool_call_id": "d"},
        {"role": "assistant", "content": "3"},
    ]
    assert request.tools == [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"reasoning": {"effort": "low"}}, "reasoning"),
        ({"text": {"format": {"type": "json_schema"}}}, "text"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"truncation": "auto"}, "truncation"),
        ({"tool_choice": {"type": "function", "name": "add"}}, "tool_choice"),
    ],
)
def test_what_is_wrong_or_not_supported_is_refused_by_name(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        parse(**changes)
    assert refused.value.param == param


TURNS = {
    "text": completion(),
    "empty": completion(text=""),
    "truncated": completion(finish_reason="length"),
    "thinking": completion(text="", thinking="hm"),
    "calls": completion(text="", calls=CALLS, finish_reason="tool_calls"),
    "all": completion(thinking="hm", calls=CALLS, finish_reason="tool_calls"),
}


@pytest.mark.parametrize("name", TURNS)
def test_a_stream_ends_with_the_reply(name: str) -> None:
    request = parse(stream=True, tools=[TOOL], include=["message.output_text.logprobs"], return_token_ids=True)
    events = stream(openai_responses.events(request, HEAD), TURNS[name])
    reply = openai_responses.reply(request, [TURNS[name]], HEAD)
    assert events[-1][1]["response"] == reply
    assert events[-1][0] == ("response.incomplete" if name == "truncated" else "response.completed")
    assert [data["type"] for _, data in events] == [kind for kind, _ in events]
    assert [data["sequence_number"] for _, data in events] == [*range(len(events))]
    assert [kind for kind, _ in events[:2]] == ["response.created", "response.in_progress"]
    done = [data["item"] for kind, data in events if kind == "response.output_item.done"]
    added = [data["item"]["id"] for kind, data in events if kind == "response.output_item.added"]
    assert done == reply["output"] and added == [item["id"] for item in done]


def test_events_of_items_are_in_the_order_of_the_sdk() -> None:
    events = stream(openai_responses.events(parse(stream=True, tools=[TOOL]), HEAD), TURNS["all"])
    kinds = [kind.removeprefix("response.") for kind, _ in events if kind is not None]
    assert kinds == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done",
        *["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"] * 2,
        "completed",
    ]  # fmt: skip


def test_text_before_and_after_thinking_is_two_messages_with_each_token_once() -> None:
    request = parse(stream=True, include=["message.output_text.logprobs"])
    events, whole = openai_responses.events(request, HEAD), completion(text="Hello é", thinking="hm")
    text = events.start(whole.prompt_token_ids) + events.delta(Delta(0, "Hello", "", (), [7], [-0.5], ["Hello"]))
    text += events.delta(Delta(0, "", "hm", (), [], [], [])) + events.delta(Delta(0, " é", "", (), [8], [-1.0], [" é"]))
    *_, (_, data) = read(text + events.finish(0, whole) + events.end())
    output = data["response"]["output"]
    assert [item["type"] for item in output] == ["message", "reasoning", "message"] and len({item["id"] for item in output}) == 3
    parts = [item["content"][0] for item in (output[0], output[2])]
    assert [(part["text"], [one["logprob"] for one in part["logprobs"]]) for part in parts] == [("Hello", [-0.5]), (" é", [-1.0])]


@pytest.mark.parametrize("name", TURNS)
def test_output_items_are_accepted_in_the_next_request(name: str) -> None:
    output = openai_responses.reply(parse(), [TURNS[name]], HEAD)["output"]
    (_, turn) = parse(input=[{"role": "user", "content": "hi"}, *output]).messages
    assert (turn["content"], turn.get("reasoning_content", "")) == (TURNS[name].text, TURNS[name].thinking)
    assert len(turn.get("tool_calls", ())) == len(TURNS[name].calls)


def test_replies_and_events_are_those_of_the_sdk() -> None:
    types = import_module("openai.types.responses")
    from pydantic import TypeAdapter

    request = parse(stream=True, tools=[TOOL], include=["message.output_text.logprobs"])
    types.Response.model_validate(openai_responses.reply(request, [TURNS["all"]], HEAD))
    for _, data in stream(openai_responses.events(request, HEAD), TURNS["all"]):
        assert TypeAdapter(types.ResponseStreamEvent).validate_python(data).type == data["type"]
