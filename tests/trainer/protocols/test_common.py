"""Reading of untrusted JSON."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.protocols import anthropic_messages, openai_chat, openai_completions, openai_responses
from trainer.protocols.common import BadRequest, check_log_prob, decode_body, json_value

PROTOCOLS = (openai_chat, openai_completions, openai_responses, anthropic_messages)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["user", "text", "\ud800"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "type", "text"]), inner),
    max_leaves=8,
)
NAMES = st.sampled_from(
    [
        "model", "messages", "prompt", "input", "tools", "tool_choice", "stop", "stop_sequences", "n", "seed", "temperature",
        "top_p", "max_tokens", "system", "stream", "stream_options", "thinking", "logprobs", "text", "include", "other",
    ]
)  # fmt: skip


@pytest.mark.parametrize("raw", [b"", b"[]", b"3", b"{", b"\xff", b'{"a": ' + b"[" * 100_000, b'{"n": ' + b"9" * 10_000 + b"}"])
def test_a_body_that_is_no_json_object_is_a_bad_request(raw: bytes) -> None:
    with pytest.raises(BadRequest):
        decode_body(raw)


@given(st.dictionaries(NAMES, VALUES))
def test_any_object_is_a_request_or_a_bad_request(body: dict[str, Any]) -> None:
    base = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    for protocol in PROTOCOLS:
        for candidate in (body, base | body):
            try:
                protocol.parse(candidate)
            except BadRequest as error:
                assert str(error)


def test_values_that_no_reader_of_json_takes_are_refused() -> None:
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    for value in (math.nan, math.inf, "\udc00", deep, {"a": ["\ud800"]}):
        with pytest.raises(BadRequest):
            json_value(value, "x")


def test_a_log_prob_of_minus_infinity_is_a_number_in_json() -> None:
    assert (check_log_prob(-math.inf), check_log_prob(-0.5)) == (-9999.0, -0.5)
