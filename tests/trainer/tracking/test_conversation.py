"""Conversations for people: what is kept of them, and that no text of a model or a tool gets out of its place."""

import json
from typing import Any

import pytest

from trainer.tracking.conversation import (
    LINE,
    LINES,
    MOST_CALLS,
    MOST_TEXT,
    MOST_TURNS,
    arguments_of,
    conversation_of,
    lines_of,
    shortened,
    split_prompt,
    visible,
)


def called(*calls: tuple[str, str, str]) -> list[dict[str, Any]]:
    return [{"id": id, "type": "function", "function": {"name": name, "arguments": text}} for id, name, text in calls]


MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Use tools."},
    {"role": "user", "content": "1+1?"},
    {
        "role": "assistant", "content": "Let me add.", "reasoning_content": "easy", "sampled": True,
        "tool_calls": called(("a", "add", '{"x": 1, "y": "1"}'), ("b", "sub", "{}")),
    },
    {"role": "tool", "tool_call_id": "b", "content": "0", "status": "ok", "reward": 0.5},
    {"role": "tool", "tool_call_id": "a", "content": "Error: add failed", "status": "error"},
    {"role": "assistant", "content": "2", "sampled": True, "truncated": True, "reward": -1.0},
]  # fmt: skip


def test_turns_have_calls_results_and_rewards() -> None:
    assert conversation_of(MESSAGES) == [
        {"role": "system", "text": "Use tools.", "sampled": False},
        {"role": "user", "text": "1+1?", "sampled": False},
        {
            "role": "assistant", "text": "Let me add.", "sampled": True, "thinking": "easy",
            "calls": [["add", 'x=1, y="1"'], ["sub", ""]],
        },
        {"role": "tool", "text": "0", "sampled": False, "name": "sub", "status": "ok", "reward": 0.5},
        {"role": "tool", "text": "Error: add failed", "sampled": False, "name": "add", "status": "error"},
        {"role": "assistant", "text": "2", "sampled": True, "reward": -1.0, "truncated": True},
    ]  # fmt: skip


def test_prompt_ends_at_the_first_sampled_turn() -> None:
    prompt, rest = split_prompt(conversation_of(MESSAGES))
    assert [turn["role"] for turn in prompt] == ["system", "user"] and len(rest) == 4
    assert [len(part) for part in split_prompt(conversation_of(MESSAGES[:2]))] == [2, 0]


def test_long_texts_keep_both_ends_and_a_note() -> None:
    text = "a" * 60_000 + "b" * 40_000
    short = shortened(text)
    assert short.startswith("a" * 500) and short.endswith("b" * 500) and " … 99,000 characters are left out here … " in short
    assert shortened("c" * MOST_TEXT) == "c" * MOST_TEXT
    many = [{"role": text, "content": text, "reasoning_content": text, "tool_calls": called(*[("i", text, text)] * 50)}] * 500
    turns = conversation_of(many)
    assert len(turns) == MOST_TURNS + 1 and turns[24]["text"] == "468 messages are left out here"
    assert len(turns[0]["calls"]) == MOST_CALLS + 1 and turns[0]["calls"][-1] == ["", "and 42 more calls"]
    assert len(json.dumps(turns)) < MOST_TURNS * (3 + 2 * MOST_CALLS) * (MOST_TEXT + 200), "whatever a model writes"


def test_control_characters_are_written_as_codes() -> None:
    assert (
        visible("a\x1b[31m\x00\x07\r\x9b\u202eb\u2066\ud800\n\tä🙂")
        == "a\\x1b[31m\\x00\\x07\\r\\x9b\\u202eb\\u2066\\ud800\n\tä🙂"
    )
    hostile = "\x1b]0;x\x07\u202e</script>"
    messages = [
        {"role": hostile, "content": hostile, "thinking": hostile, "tool_calls": called((hostile, hostile, hostile))},
        {"role": "tool", "tool_call_id": hostile, "content": hostile},
    ]
    found = conversation_of(messages)
    written = json.dumps(found, ensure_ascii=False)
    assert not {"\x1b", "\x07", "\u202e"} & set(written) and "\\u001b" not in written
    assert found[1]["name"] == "\\x1b]0;x\\x07\\u202e</script>"


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ('{"a": [1, "ä"], "b": null}', 'a=[1, "ä"], b=null'),
        ({"a": 1}, "a=1"),
        ("not JSON", "not JSON"),
        ("[1]", "[1]"),
        (None, "null"),
    ],
)
def test_arguments_are_written_as_in_a_program(arguments: Any, written: str) -> None:
    assert arguments_of(arguments) == written


def test_messages_of_any_program_are_shown() -> None:
    """Loops of the user may add whatever JSON they like."""
    assert conversation_of(
        [{"content": [{"type": "text", "text": "x"}]}, {"role": "tool", "tool_call_id": "none", "content": None}]
    ) == [
        {"role": "None", "text": '[{"type": "text", "text": "x"}]', "sampled": False},
        {"role": "tool", "text": "", "sampled": False},
    ]


def test_terminal_has_a_line_for_each_turn() -> None:
    lines = lines_of(conversation_of(MESSAGES))
    assert lines[2:] == [
        ("assistant", 'Let me add. add(x=1, y="1") sub()', True),
        ("tool sub", "0  [reward 0.5]", False),
        ("tool add", "Error: add failed", False),
        ("assistant", "2  [reward -1, truncated]", True),
    ]
    long = conversation_of([{"role": "user", "content": "line\n" * 100}] * 30)
    lines = lines_of(long)
    assert len(lines) == LINES + 1 and lines[5][1] == "… 20 turns are left out here"
    assert lines[0][1].startswith("line line") and len(lines[0][1]) < LINE + 30 and "(499 characters)" in lines[0][1]
