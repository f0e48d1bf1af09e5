"""Streams of turns have the text of the messages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.agents.formats import call_format
from trainer.serving.turn_splitter import TurnSplitter

CALLS = {
    "hermes": '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
    "qwen3_coder": "<tool_call><function=f>\n<parameter=a>\n1\n</parameter>\n</function></tool_call>",
    "llama3_json": '{"name": "f", "parameters": {}}',
    "pythonic": "[f(a=1)]",
}
PIECES = st.sampled_from(
    ["<think>", "</think>", " ", "\n", "a", "<", "<tool", "{", "[", "word", "<|python_tag|>", "é", *CALLS.values(), "<tool_call>"]
)


def streamed(splitter: TurnSplitter, text: str, size: int, *, truncated: bool) -> tuple[str, str, tuple[str, str, int]]:
    """Thinking and content of the stream, and (thinking, content, number of calls) of the message."""
    parts = [splitter.add(text[i : i + size]) for i in range(0, len(text), size)]
    thinking, content, calls = splitter.end(truncated=truncated, turn=0)
    parts.append(splitter.rest(thinking, content))
    return "".join(a for a, _ in parts), "".join(b for _, b in parts), (thinking, content, len(calls))


@given(
    st.lists(PIECES, max_size=8).map("".join), st.integers(1, 7), st.booleans(), st.booleans(),
    st.sampled_from([None, "mine.py:f", *CALLS]),
)  # fmt: skip
def test_a_stream_has_the_text_of_the_message(text: str, size: int, truncated: bool, in_thinking: bool, name: str | None) -> None:
    format = None if name is None else call_format("hermes" if name == "mine.py:f" else name)
    splitter = TurnSplitter(name, format, [], in_thinking=in_thinking)
    thinking, content, message = streamed(splitter, text, size, truncated=truncated)
    assert (thinking, content) == message[:2]


@pytest.mark.parametrize("name", CALLS)
def test_text_is_streamed_up_to_a_call(name: str) -> None:
    splitter = TurnSplitter(name, call_format(name), [], in_thinking=False)
    assert splitter.add("<think>h") == ("h", "")
    assert splitter.add("m</thi") == ("m", "")
    if name in ("hermes", "qwen3_coder"):
        assert splitter.add("nk>\nsee <to") == ("", "see")
        assert splitter.add("ol") == ("", "")
    else:
        assert splitter.add("nk>\n") == ("", "")
    assert splitter.add("_call>" if name in ("hermes", "qwen3_coder") else CALLS[name][:3]) == ("", "")


def test_whitespace_is_streamed_with_the_text_after_it() -> None:
    splitter = TurnSplitter(None, None, [], in_thinking=False)
    assert [splitter.add(part)[1] for part in (" a", " \n", "b", " ")] == ["a", "", " \nb", ""]
    assert splitter.end(truncated=False, turn=0) == ("", "a \nb", ())
