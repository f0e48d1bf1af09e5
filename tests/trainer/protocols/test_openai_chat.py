"""OpenAI's chat completions: parsing, replies, streams."""

from importlib import import_module
from typing import Any

import pytest

from tests.trainer.protocols.streams import CALLS, HEAD, completion, stream
from trainer.protocols import openai_chat
from trainer.protocols.common import BadRequest, SamplingOptions

TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}, "strict": True}}
USER = {"role": "user", "content": "hi"}


def body(**changes: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [USER]} | changes


def test_all_options_are_read() -> None:
    request = openai_chat.parse(
        body(
            temperature=0.5, top_p=0.9, top_k=5, max_completion_tokens=64, seed=-3, stop=["\n", "END"], n=2, stream=True,
            logprobs=True, return_token_ids=True, stream_options={"include_usage": True}, tools=[TOOL], tool_choice="auto",
        )
    )  # fmt: skip
    assert request.sampling == SamplingOptions(0.5, 0.9, 5, 64, -3, ("\n", "END"), 2)
    assert request.stream and request.include_usage and request.logprobs and request.return_token_ids
    # Without «strict»: the model gets the schema as in training.
    assert request.tools == [
        {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
    ]


def test_a_bare_request_leaves_sampling_to_the_server() -> None:
    request = openai_chat.parse(body())
    assert (request.sampling, request.tools, request.messages) == (SamplingOptions(), None, [USER])


def test_a_conversation_with_calls_has_the_form_of_the_conversation_tree() -> None:
    call = {"id": "c", "type": "function", "index": 0, "function": {"name": "add", "arguments": '{"a": 1}'}}
    parts = [{"type": "text", "text": "be"}, {"type": "text", "text": " brief"}]
    request = openai_chat.parse(
        body(
            messages=[
                {"role": "developer", "content": parts},
                USER | {"name": "ada"},
                {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "hm", "refusal": None, "audio": None},
                {"role": "tool", "tool_call_id": "c", "content": "3", "name": "add"},
                {"role": "assistant", "tool_calls": None, "content": "3"},
            ],
            tools=[TOOL],
        )
    )
    made = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert request.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi", "name": "ada"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [made]},
        {"role": "tool", "content": "3", "tool_call_id": "c", "name": "add"},
        {"role": "assistant", "content": "3"},
    ]


def test_tool_choice_none_asks_for_no_calls() -> None:
    assert openai_chat.parse(body(tools=[TOOL], tool_choice="none")).tools is None


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"model": None}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        ({"messages": [USER | {"mood": "good"}]}, "messages[0].mood"),
        ({"messages": [{"role": "tool", "content": "3"}]}, "messages[0].tool_call_id"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{"}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"n": 1.5}, "n"),
        ({"seed": 1 << 64}, "seed"),
        ({"stop": ["a", ""]}, "stop"),
        ({"top_logprobs": 2, "logprobs": True}, "top_logprobs"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"stream_options": {"speed": 1}}, "stream_options.speed"),
        ({"store": True}, "store"),
        ({"guided_regex": "a+"}, "guided_regex"),
    ],
)
def test_what_is_wrong_or_not_supported_is_refused_by_name(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        openai_chat.parse(body(**changes))
    assert refused.value.param == param


def test_fields_that_ask_for_nothing_are_accepted() -> None:
    openai_chat.parse(
        body(
            user="u", logit_bias={}, top_logprobs=0, frequency_penalty=0, presence_penalty=0.0, response_format={"type": "text"},
            parallel_tool_calls=True, store=False, function_call=None, metadata={"a": "b"},
        )
    )  # fmt: skip


def test_a_reply_has_ids_and_log_probs_where_verifiers_reads_them() -> None:
    request = openai_chat.parse(body(logprobs=True, return_token_ids=True, n=2))
    reply = openai_chat.reply(request, [completion(), completion(text="x", calls=CALLS, finish_reason="tool_calls")], HEAD)
    first, second = reply["choices"]
    assert (reply["prompt_token_ids"], first["token_ids"]) == ([1, 2, 3], [7, 8])
    assert [item["logprob"] for item in first["logprobs"]["content"]] == [-0.5, -1.0]
    assert first["logprobs"]["content"][1] == {"token": " é", "bytes": [32, 195, 169], "logprob": -1.0, "top_logprobs": []}
    assert first["message"] == {"role": "assistant", "content": "Hello é"}
    assert [call["function"] for call in second["message"]["tool_calls"]] == [
        {"name": "add", "arguments": '{"a": 1, "b": "é"}'}, {"name": "add", "arguments": "{}"},
    ]  # fmt: skip
    assert reply["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}


def test_a_reply_without_request_for_them_has_no_ids_and_log_probs() -> None:
    reply = openai_chat.reply(openai_chat.parse(body()), [completion()], HEAD)
    assert reply["choices"][0]["logprobs"] is None and "token_ids" not in reply["choices"][0] and "prompt_token_ids" not in reply


def test_the_message_of_a_reply_is_accepted_in_the_next_request() -> None:
    turn = completion(text="a", thinking="b", calls=CALLS, finish_reason="tool_calls")
    message = openai_chat.reply(openai_chat.parse(body()), [turn], HEAD)["choices"][0]["message"]
    (_, again) = openai_chat.parse(body(messages=[USER, message])).messages
    assert (again["content"], again["reasoning_content"]) == ("a", "b")
    assert [call["function"]["arguments"] for call in again["tool_calls"]] == [{"a": 1, "b": "é"}, {}]


def test_a_stream_has_the_parts_of_each_choice_and_ends_with_usage_and_done() -> None:
    request = openai_chat.parse(
        body(stream=True, stream_options={"include_usage": True}, n=2, logprobs=True, return_token_ids=True)
    )
    turn = completion(text="ab", thinking="t", calls=CALLS, finish_reason="tool_calls")
    events = stream(openai_chat.events(request, HEAD), completion(), turn)
    assert events[-1] == (None, "[DONE]")
    assert events[-2][1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    chunks = [data for _, data in events[:-2]]
    assert chunks[0]["prompt_token_ids"] == [1, 2, 3]
    for index, expected in enumerate([completion(), turn]):
        choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in choices) == expected.text
        assert [token for choice in choices for token in choice.get("token_ids", ())] == [7, 8]
        assert [item["logprob"] for choice in choices if choice["logprobs"] for item in choice["logprobs"]["content"]] == [
            -0.5,
            -1.0,
        ]
        assert choices[-1]["finish_reason"] == expected.finish_reason
    calls = [call for chunk in chunks for choice in chunk["choices"] for call in choice["delta"].get("tool_calls", ())]
    assert [(call["index"], call["id"], call["function"]["arguments"]) for call in calls] == [
        (0, "call_0_0", '{"a": 1, "b": "é"}'), (1, "call_0_1", "{}"),
    ]  # fmt: skip


def test_replies_and_chunks_are_those_of_the_sdk() -> None:
    types = import_module("openai.types.chat")
    request = openai_chat.parse(body(logprobs=True, stream=True, stream_options={"include_usage": True}))
    turn = completion(calls=CALLS, finish_reason="tool_calls")
    types.ChatCompletion.model_validate(openai_chat.reply(request, [turn], HEAD), strict=True)
    for _, data in stream(openai_chat.events(request, HEAD), turn)[:-1]:
        types.ChatCompletionChunk.model_validate(data, strict=True)


def test_an_error_has_openais_body() -> None:
    assert openai_chat.error(400, "no", "n") == {
        "error": {"message": "no", "type": "invalid_request_error", "param": "n", "code": None}
    }
