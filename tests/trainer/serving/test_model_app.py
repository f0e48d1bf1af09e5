"""HTTP of the model server, over an engine that repeats what it is asked to say."""

import http.client
import json
import random
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.model_serving import JSON, TOKEN, EchoServer, echo_server, post
from tests.trainer.protocols.streams import read

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": "é"}}</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": SCHEMA}}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "echo", "messages": [{"role": "user", "content": "say:hi"}], "tools": [TOOL]},
    COMPLETIONS: {"model": "echo", "prompt": "say:hi"},
    RESPONSES: {"model": "echo", "input": "say:hi", "tools": [{"type": "function", "name": "add", "parameters": SCHEMA}]},
    MESSAGES: {
        "model": "echo", "max_tokens": 64, "messages": [{"role": "user", "content": "say:hi"}],
        "tools": [{"name": "add", "input_schema": SCHEMA}],
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[EchoServer]:
    with echo_server("server.max_request_mb=0.0625") as found:
        yield found


def say(text: str, **changes: Any) -> dict[str, Any]:
    return BODIES[CHAT] | {"tools": None, "messages": [{"role": "user", "content": f"say:{text}"}]} | changes


def test_openais_sdk_chats_calls_and_streams(server: EchoServer) -> None:
    openai = import_module("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=TOKEN, max_retries=0)
    assert [model.id for model in client.models.list()] == ["echo"]
    messages = [{"role": "user", "content": f"say:let me see{CALL}{CALL}"}]
    options = {"model": "echo", "messages": messages, "tools": [TOOL]}
    reply = client.chat.completions.create(**options, logprobs=True, extra_body={"return_token_ids": True})
    choice = reply.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "let me see")
    calls = [(call.id, call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
    assert calls == [("call_0_0", "add", {"a": 1, "b": "é"}), ("call_0_1", "add", {"a": 1, "b": "é"})]
    assert len(choice.token_ids) == len(choice.logprobs.content) == reply.usage.completion_tokens
    assert [item.logprob for item in choice.logprobs.content] == [-i / 8 for i in range(len(choice.token_ids))]
    assert len(reply.prompt_token_ids) == reply.usage.prompt_tokens

    chunks = [*client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "let me see"
    streamed = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [(call.index, call.id, json.loads(call.function.arguments)) for call in streamed] == [
        (0, "call_0_0", {"a": 1, "b": "é"}), (1, "call_0_1", {"a": 1, "b": "é"}),
    ]  # fmt: skip
    assert chunks[-1].usage == reply.usage

    # The next request has the SDK's own message.
    results = [{"role": "tool", "tool_call_id": call_id, "content": "3"} for call_id, *_ in calls]
    again = [*messages, choice.message, *results, {"role": "user", "content": "say:done"}]
    assert client.chat.completions.create(model="echo", messages=again, tools=[TOOL]).choices[0].message.content == "done"
    completion = client.completions.create(model="echo", prompt=["say:a", "say:b"], n=2, logprobs=0)
    assert [choice.text for choice in completion.choices] == ["a", "a", "b", "b"]


def test_openais_sdk_uses_responses(server: EchoServer) -> None:
    openai = import_module("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=TOKEN, max_retries=0)
    question = {"role": "user", "content": f"say:see{CALL}"}
    options = {"model": "echo", "input": [question], "tools": BODIES[RESPONSES]["tools"]}
    reply = client.responses.create(**options)
    assert reply.output_text == "see" and [item.type for item in reply.output] == ["message", "function_call"]
    with client.responses.stream(**options) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert [item.type for item in final.output] == ["message", "function_call"] and final.output_text == "see"
    call = final.output[1]
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1, "b": "é"})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
    again = [question, *reply.output, result, {"role": "user", "content": "say:done"}]
    assert client.responses.create(model="echo", input=again, tools=options["tools"]).output_text == "done"


def test_anthropics_sdk_chats_calls_and_streams(server: EchoServer) -> None:
    anthropic = import_module("anthropic")
    client = anthropic.Anthropic(base_url=server.url, api_key=TOKEN, max_retries=0)
    question = {"role": "user", "content": f"say:see{CALL}"}
    options = {"model": "echo", "max_tokens": 200, "messages": [question], "tools": BODIES[MESSAGES]["tools"]}
    reply = client.messages.create(**options)
    assert reply.stop_reason == "tool_use" and [block.type for block in reply.content] == ["text", "tool_use"]
    with client.messages.stream(**options) as stream:
        texts = [*stream.text_stream]
        final = stream.get_final_message()
    assert "".join(texts) == "see" and final.content[1].input == {"a": 1, "b": "é"}
    assert final.usage.output_tokens == reply.usage.output_tokens
    result = {"type": "tool_result", "tool_use_id": final.content[1].id, "content": "3"}
    again = [question, {"role": "assistant", "content": reply.content}, {"role": "user", "content": [result]}]
    again.append({"role": "user", "content": "say:done"})
    assert client.messages.create(**options | {"messages": again}).content[0].text == "done"
    with pytest.raises(anthropic.BadRequestError, match="chat template decides"):
        client.messages.create(**options, thinking={"type": "enabled", "budget_tokens": 1024})


@pytest.mark.parametrize("path", BODIES)
def test_each_protocol_streams_what_it_replies(server: EchoServer, path: str) -> None:
    assert post(server.url, path, BODIES[path])[0] == 200
    status, text = post(server.url, path, BODIES[path] | {"stream": True})
    assert status == 200 and "hi" in "".join(re.findall(r'"(?:content|delta|text)":\s?"(\w+)"', text))
    assert read(text)[-1][1] == "[DONE]" or read(text)[-1][0] in ("response.completed", "message_stop")


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("changes", "headers", "status", "message"),
    [
        ({}, {"Content-Type": "application/json"}, 401, "no token, or the wrong one"),
        ({}, JSON | {"Authorization": "Bearer wrong"}, 401, "no token, or the wrong one"),
        ({}, JSON | {"Content-Type": "text/plain"}, 415, "must be application/json"),
        ({"model": "other"}, JSON, 404, "model 'other': not here; this server has 'echo'"),
        ({"temperature": 9}, JSON, 400, "temperature: must be a number from 0 to 2"),
        ({"metadata": "x" * 70_000}, JSON, 413, "larger than server.max_request_mb=0.0625"),
    ],
)
def test_a_refusal_has_the_error_body_of_its_protocol(
    server: EchoServer, path: str, changes: dict[str, Any], headers: dict[str, str], status: int, message: str
) -> None:
    found, reply = post(server.url, path, BODIES[path] | changes, headers)
    assert found == status and message in reply["error"]["message"] and reply["error"]["type"]
    assert (reply.get("type") == "error") == (path == MESSAGES)
    assert ("code" in reply["error"]) == (path != MESSAGES)


def test_the_key_of_anthropics_clients_is_a_token(server: EchoServer) -> None:
    headers = {"Content-Type": "application/json", "x-api-key": TOKEN}
    assert post(server.url, MESSAGES, BODIES[MESSAGES], headers)[0] == 200
    assert post(server.url, MESSAGES, BODIES[MESSAGES], headers | {"x-api-key": "wrong"})[0] == 401
    assert post(server.url, "/v1/models", None, {}, method="GET")[0] == 401
    (listed,) = post(server.url, "/v1/models", None, headers, method="GET")[1]["data"]
    assert listed["id"] == "echo" and post(server.url, "/v1/models/echo", None, headers, method="GET") == (200, listed)
    status, reply = post(server.url, "/v1/models/own/other", None, headers, method="GET")
    assert status == 404 and reply["error"]["code"] == "model_not_found" and "'own/other': not here" in reply["error"]["message"]
    assert post(server.url, "/v1/models/echo", None, {}, method="GET")[0] == 401


def test_an_unknown_path_or_method_is_an_error_with_a_body(server: EchoServer) -> None:
    error = post(server.url, "/v1/embeddings", {})[1]["error"]
    assert (error["type"], error["code"]) == ("not_found_error", None)
    status, reply = post(server.url, f"{MESSAGES}/count_tokens", {})
    assert status == 404 and reply["type"] == "error" and reply["error"]["type"] == "not_found_error"
    assert post(server.url, MESSAGES, None, method="GET") == (
        405, {"type": "error", "error": {"type": "invalid_request_error", "message": "GET /v1/messages: Method Not Allowed"}},
    )  # fmt: skip


def test_a_prompt_that_is_too_long_or_outside_the_vocabulary_is_a_bad_request(server: EchoServer) -> None:
    status, reply = post(server.url, CHAT, say("x" * 2000))
    assert status == 400 and "maximum model length is 1024 tokens" in reply["error"]["message"]
    status, reply = post(server.url, COMPLETIONS, {"model": "echo", "prompt": [5, 100_000]})
    assert status == 400 and "token 100000 is outside the vocabulary" in reply["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_response_before_it(server: EchoServer, stream: bool) -> None:
    body = say("one two END three " + "x" * 100, stop=["three", "EN"], stream=stream, return_token_ids=True)
    _, reply = post(server.url, CHAT, body)
    if stream:
        choices = [data["choices"][0] for _, data in read(reply)[:-1]]
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        ids = [token for choice in choices for token in choice.get("token_ids", ())]
        assert choices[-1]["finish_reason"] == "stop"
    else:
        (choice,) = reply["choices"]
        text, ids = choice["message"]["content"] + " ", choice["token_ids"]
        assert choice["finish_reason"] == "stop"
    # Up to the token that completes it. The space before it is no part of a message, see TurnSplitter.
    assert text.rstrip() == "one two" and len(ids) == len("one two EN")
    _, reply = post(server.url, MESSAGES, BODIES[MESSAGES] | {"messages": body["messages"], "stop_sequences": ["END"]})
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", "END")


def test_what_follows_a_stop_string_is_not_generated() -> None:
    with echo_server() as server:
        # While the response to the other prompt is still generated.
        post(
            server.url, COMPLETIONS, {"model": "echo", "prompt": ["say:one END " + "x" * 500, "say:" + "x" * 900], "stop": "END"}
        )
        assert len(server.rollout.aborted) == 1


def test_max_tokens_ends_a_response(server: EchoServer) -> None:
    _, reply = post(server.url, CHAT, say("abcdef" + CALL, max_tokens=3, tools=[TOOL]))
    assert (reply["choices"][0]["finish_reason"], reply["choices"][0]["message"]["content"]) == ("length", "abc")


def test_thinking_is_apart_from_the_answer(server: EchoServer) -> None:
    _, reply = post(server.url, CHAT, say("<think>hm</think>\nyes"))
    assert reply["choices"][0]["message"] == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    _, text = post(server.url, CHAT, say("<think>hm</think>\nyes", stream=True))
    deltas = [data["choices"][0]["delta"] for _, data in read(text)[:-1]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm"
    assert "".join(delta.get("content", "") for delta in deltas) == "yes"


def test_a_seed_is_refused_by_an_engine_that_has_none() -> None:
    with echo_server(has_seeds=False) as server:
        status, reply = post(server.url, CHAT, say("hi", seed=1))
        assert (status, reply["error"]["param"]) == (400, "seed")
        assert post(server.url, CHAT, say("hi"))[0] == 200


def test_too_many_requests_are_refused_and_others_answered() -> None:
    with echo_server(most=4) as server, ThreadPoolExecutor(8) as pool:
        server.rollout.hold.clear()
        first = pool.submit(post, server.url, CHAT, say("hi", n=4))
        while server.engine.unfinished < 4:
            time.sleep(0.01)
        status, reply = post(server.url, CHAT, say("hi"))
        assert (status, reply["error"]["type"]) == (429, "rate_limit_error")
        assert post(server.url, MESSAGES, BODIES[MESSAGES])[1]["error"]["type"] == "rate_limit_error"
        assert post(server.url, CHAT, say("hi", n=5))[0] == 400
        server.rollout.hold.set()
        status, reply = first.result()
        assert status == 200 and [choice["message"]["content"] for choice in reply["choices"]] == ["hi"] * 4
        assert post(server.url, CHAT, say("hi"))[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_requests_of_a_client_that_has_gone_leave_the_engine(stream: bool) -> None:
    with echo_server() as server:
        server.rollout.hold.clear()
        parts = urlsplit(server.url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10)
        connection.request("POST", CHAT, json.dumps(say("x" * 200, stream=stream)), JSON)
        if stream:
            connection.getresponse().read1(10)
        while server.rollout.most_running < 1:  # a request that has not begun would leave without an abort
            time.sleep(0.01)
        if connection.sock is not None:
            connection.sock.close()
        connection.close()
        deadline = time.monotonic() + 10
        while server.engine.unfinished and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.engine.unfinished == 0
        server.rollout.hold.set()
        deadline = time.monotonic() + 10
        while not server.rollout.aborted and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(server.rollout.aborted) == 1


def test_a_stop_of_the_server_answers_what_is_in_flight() -> None:
    with echo_server() as server, ThreadPoolExecutor(2) as pool:
        server.rollout.hold.clear()
        streamed = pool.submit(post, server.url, MESSAGES, BODIES[MESSAGES] | {"stream": True})
        whole = pool.submit(post, server.url, CHAT, say("hi"))
        while server.engine.unfinished < 2:
            time.sleep(0.01)
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        time.sleep(0.1)
        server.rollout.hold.set()
        stopping.join()
        status, text = streamed.result()
        kind, data = read(text)[-1]
        # Each of them may have ended in the last tick.
        assert (kind, data["type"]) == ("error", "error") or kind == "message_stop"
        assert whole.result()[0] in (200, 503)
        status, reply = post(server.url, CHAT, say("hi"))
        assert status == 503 and reply["error"]["message"] == "the server is stopping"


def test_requests_of_many_clients_run_together(server: EchoServer) -> None:
    with ThreadPoolExecutor(16) as pool:
        texts = [f"{i}" * 40 for i in range(32)]
        found = pool.map(lambda text: post(server.url, CHAT, say(text))[1]["choices"][0]["message"]["content"], texts)
        assert [*found] == texts
    assert server.rollout.most_running > 4


WRONG: list[Any] = [
    None, True, -1, 0, 1.5, 1e400, "", "x", "\ud800", "say:\ud83d", [], {}, [None], [[]], {"type": "x"}, [{"role": "user"}],
    "null", 10**30, [{"type": "text", "text": 5}], {"a": {"b": [1, "\udfff"]}},
]  # fmt: skip


def mutated(body: Any, drawn: random.Random) -> Any:
    """The body with one value anywhere in it replaced, removed or added."""
    if isinstance(body, dict) and body and drawn.random() < 0.9:
        name = drawn.choice([*body])
        kind = drawn.random()
        if kind < 0.15:
            return {key: value for key, value in body.items() if key != name}
        if kind < 0.3:
            return body | {
                drawn.choice(["stop", "n", "seed", "tool_choice", "stream_options", "new", "\ud800"]): drawn.choice(WRONG)
            }
        return body | {name: mutated(body[name], drawn)}
    if isinstance(body, list) and body and drawn.random() < 0.8:
        i = drawn.randrange(len(body))
        return [*body[:i], mutated(body[i], drawn), *body[i + 1 :], *(body[:1] if drawn.random() < 0.2 else ())]
    return drawn.choice(WRONG)


def test_mutated_requests_never_end_the_server_nor_are_its_error(server: EchoServer) -> None:
    drawn = random.Random(7)
    full: dict[str, dict[str, Any]] = {
        CHAT: BODIES[CHAT] | {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "be"}]},
                {"role": "assistant", "content": None, "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}]},
                {"role": "tool", "tool_call_id": "c", "content": "3"},
                {"role": "user", "content": "say:hi"},
            ],
            "temperature": 1, "stop": ["x"], "n": 1, "max_tokens": 4, "logprobs": True, "stream_options": {"include_usage": True},
        },
        COMPLETIONS: BODIES[COMPLETIONS] | {"prompt": [[5, 6]], "max_tokens": 4, "logprobs": 0, "top_k": 3, "top_p": 0.5},
        RESPONSES: BODIES[RESPONSES] | {"input": [
            {"role": "user", "content": [{"type": "input_text", "text": "say:hi"}]},
            {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "3"}], "max_output_tokens": 4},
        MESSAGES: BODIES[MESSAGES] | {"system": [{"type": "text", "text": "be"}], "max_tokens": 4, "messages": [
            {"role": "user", "content": "say:hi"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "add", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "3"}]}]},
    }  # fmt: skip
    statuses: list[int] = []
    for round in range(100):
        for path, body in full.items():
            for _ in range(1 + round % 2):
                body = mutated(body, drawn)
            sent = json.dumps(body).encode()
            if drawn.random() < 0.1:
                sent = sent[: drawn.randrange(len(sent) + 1)]
            status, reply = post(server.url, path, sent)
            assert status in (200, 400, 404), (path, sent, status, reply)
            assert status == 200 or reply["error"]["message"]
            statuses.append(status)
    assert statuses.count(200) > 20 and statuses.count(400) > 100
    assert post(server.url, CHAT, say("hi"))[0] == 200


def test_page_and_health_need_no_token(server: EchoServer) -> None:
    status, text = post(server.url, "/", None, {}, method="GET")
    assert status == 200 and "<title>Tandem chat</title>" in text
    status, reply = post(server.url, "/health", None, {}, method="GET")
    assert status == 200 and reply["status"] == "ok"
