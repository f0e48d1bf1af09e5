"""Messages as chat templates take them, and when two of them are equal."""

import json
from typing import Any

import pytest

from trainer.agents.messages import call_ids, canonical, difference
from trainer.data.encoding import Message, parsed, with_text_arguments


def asked(arguments: Any, **more: Any) -> Message:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": arguments}} | more],
    }


def same(one: Message, other: Message) -> bool:
    first, second = parsed([one, other])
    return canonical(first) == canonical(second)


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ({"role": "assistant", "content": "a"}, {"content": "a", "role": "assistant"}, True),
        ({"role": "assistant"}, {"role": "assistant", "content": None, "tool_calls": [], "refusal": None}, True),
        ({"role": "assistant", "content": ""}, {"role": "assistant", "content": None}, True),
        ({"role": "assistant", "content": "a"}, {"role": "assistant", "content": "a "}, False),
        ({"role": "assistant", "content": "a"}, {"role": "user", "content": "a"}, False),
        (asked('{"a": 1, "b": [2]}'), asked({"b": [2], "a": 1}), True),
        (asked('{"a": 1}'), asked('{"a": "1"}'), False),
        (asked('{"a": 1}'), asked('{"a": null}'), False),
        (asked("{broken"), asked("{broken"), True),
        (asked("{broken"), asked("{broken "), False),
        (asked("{}", index=0, id="y", type="function"), asked("{}"), True),
        (asked("{}"), asked("{}") | {"tool_calls": asked("{}")["tool_calls"] * 2}, False),
        (asked("{}"), {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}}]}, True),
        ({"role": "tool", "content": "3", "tool_call_id": "x"}, {"role": "tool", "content": "3", "tool_call_id": "y"}, True),
        ({"role": "tool", "content": "3", "name": "f"}, {"role": "tool", "content": "3", "name": "g"}, False),
    ],
)
def test_messages_are_equal_if_they_mean_the_same(one: Message, other: Message, equal: bool) -> None:
    assert same(one, other) is equal and same(other, one) is equal


def test_parsed_messages_are_deep_copies_with_values_as_arguments_and_without_nulls() -> None:
    given = asked('{"b": 1, "a": {"é": 2}}') | {"refusal": None}
    (made,) = parsed([given])
    assert made["content"] is None and "refusal" not in made
    arguments = made["tool_calls"][0]["function"]["arguments"]
    assert arguments == {"b": 1, "a": {"é": 2}} and list(arguments) == ["b", "a"]  # templates write them in this order
    arguments["b"] = 2
    assert given == asked('{"b": 1, "a": {"é": 2}}') | {"refusal": None}
    assert parsed([asked("{broken")])[0] == asked("{broken")
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    parsed([parts])[0]["content"][0]["text"] = "b"
    assert parts["content"] == [{"type": "text", "text": "a"}]


def test_arguments_as_text_are_json_and_text_stays_as_it_is() -> None:
    (values,) = parsed([asked({"b": "é", "a": 1})])
    text = with_text_arguments(values)["tool_calls"][0]["function"]["arguments"]
    assert text == '{"b": "é", "a": 1}' and json.loads(text) == {"b": "é", "a": 1}
    assert with_text_arguments(asked("{broken")) == asked("{broken")
    assert with_text_arguments({"role": "user", "content": "a"}) == {"role": "user", "content": "a"}


def test_the_first_different_field_is_named() -> None:
    assert difference({"content": "a"}, {"content": "b"}) == "its content is 'a' and was 'b' when it was sampled"
    assert difference({"content": "a"}, {"content": "a", "thinking": "b"}).startswith("its thinking is None and was 'b'")
    assert difference({"content": None}, {"content": ""}) == "it is the message that was sampled"


def test_ids_of_calls_are_listed_in_order() -> None:
    assert call_ids([{"role": "user", "content": "a"}, asked("{}"), asked("{}", id="y"), {"tool_calls": [{}]}]) == [
        "x",
        "y",
        None,
    ]
