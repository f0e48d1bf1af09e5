"""Trained tokens of conversations with tool calls, compared with generation token by token."""

import json
from collections import Counter
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import pytest

from data_preprocess.tiny_model import TOOL_TEMPLATE, character_tokenizer
from data_preprocess.writer import write
from tests.trainer.agents.families import EOS, FAMILIES, MISTRAL, PHI3, QWEN25, Family
from trainer.data.encoding import Message, parsed, with_text_arguments
from trainer.data.sft_dataset import SFTDataset
from trainer.data.turns import TurnEncoder, Turns

TINY = Family("tiny", TOOL_TEMPLATE, (), lambda message, rng: "")
TINY.__dict__["tokenizer"] = character_tokenizer(None, with_tools=True)
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]


def encoder(family: Family) -> TurnEncoder:
    tokenizer = deepcopy(family.tokenizer)
    tokenizer.eos_token = tokenizer.eos_token or EOS
    return TurnEncoder(tokenizer, {})


def called(*arguments: Any, content: str | None = "") -> Message:
    calls = [
        {"id": f"call0000{i}", "type": "function", "function": {"name": "add", "arguments": each}}
        for i, each in enumerate(arguments)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def result(text: str, i: int = 0) -> Message:
    return {"role": "tool", "tool_call_id": f"call0000{i}", "content": text}


def conversation(rng: Random, most_calls: int) -> list[Message]:
    """Requests of the user, turns with calls and their results, and answers; it may end anywhere after a turn or its results."""
    found: list[Message] = []
    for _ in range(rng.randint(1, 3)):
        found.append({"role": "user", "content": f"asked {rng.randrange(100)}"})
        for _ in range(rng.randint(0, 2)):
            n = rng.randint(1, most_calls)
            texts = [{"a": rng.randrange(100), "b": "é\n"} for _ in range(n)]
            found.append(called(*(json.dumps(each) if rng.random() < 0.5 else each for each in texts)))
            found.extend(result(f"observed {rng.randrange(100)}", i) for i in range(n))
        found.append({"role": "assistant", "content": f"answer {rng.randrange(100)}"})
    return found[: -1 if rng.random() < 0.3 and found[-2]["role"] == "tool" else None]


def steps(family: Family, chat: list[Message]) -> Counter[tuple[tuple[int, ...], int]]:
    """(tokens before, token) for each token that generation samples: turns after their prompts, up to the last added token."""
    tokenizer, seams = family.tokenizer, family.seams
    messages = parsed(chat)
    messages = [with_text_arguments(message) for message in messages] if family.name == "deepseek" else messages
    found: Counter[tuple[tuple[int, ...], int]] = Counter()
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = seams.ids(seams.render(messages[:i], TOOLS, prompt=True))
            whole = seams.ids(seams.render(messages[: i + 1], TOOLS, prompt=False))
            assert whole[: len(prompt)] == prompt
            while not tokenizer.added_tokens_decoder.get(whole[-1]):
                whole.pop()
            found.update((tuple(whole[:at]), whole[at]) for at in range(len(prompt), len(whole)))
    return found


def trained_steps(rows: list[Turns]) -> Counter[tuple[tuple[int, ...], int]]:
    return Counter(
        (tuple(row.ids[:at].tolist()), int(row.ids[at])) for row in rows for at in range(len(row.ids)) if row.trained[at]
    )


@pytest.mark.parametrize("family", [*(each for each in FAMILIES.values() if each is not PHI3), TINY], ids=lambda each: each.name)
def test_every_token_of_calls_and_answers_is_trained_once_after_what_generation_sees(family: Family) -> None:
    rng, turns = Random(3), encoder(family)
    for _ in range(6):
        chat = conversation(rng, family.most_calls)
        rows = turns.chat("row 0", chat, TOOLS)
        assert trained_steps(rows) == steps(family, chat)
        texts = "".join(str(family.tokenizer.decode(row.ids[row.trained])) for row in rows)
        assert "observed" not in texts and "asked" not in texts
        assert len(rows) == 1 or family.name in ("qwen3", "gpt-oss", MISTRAL.name)
        assert sum(row.n_turns for row in rows) == sum(message["role"] == "assistant" for message in chat)
        assert not any(row.n_empty or row.n_open for row in rows)


def test_a_call_ends_its_row_where_the_template_writes_more_after_the_last_turn() -> None:
    """Phi-3: the special token after the content of such a turn may be that of the call, and is not where the turn ends."""
    chat = [{"role": "user", "content": "a"}, called({"a": 1}), result("3"), {"role": "assistant", "content": "b"}]
    rows = encoder(PHI3).chat("row 0", [*chat, *chat], TOOLS)
    texts = [str(PHI3.tokenizer.decode(row.ids[row.trained])) for row in rows]
    call = '<|call|>[{"name": "add", "arguments": {"a": 1}}]<|end|><|endoftext|>'
    assert texts == [call, "b<|end|>" + call, "b<|end|><|endoftext|>"]


def test_marks_select_the_calls() -> None:
    turn = "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<eos>"
    template = (
        "{{ tools | length if tools }}{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}"
        f"{{% generation %}}{turn}{{% endgeneration %}}{{% else %}}{{{{ m.content }}}}<eos>{{% endif %}}{{% endfor %}}"
    )
    chat = [{"role": "user", "content": "a"}, called('{"a": 1}'), result("3"), {"role": "assistant", "content": "b"}]
    for text, arguments in ((template, '{"a": 1}'), (template.replace("c.function | tojson", "'' + c.function.arguments"), None)):
        tokenizer = character_tokenizer(None, with_tools=True)
        tokenizer.chat_template = text
        (row,) = TurnEncoder(tokenizer, {}).chat("row 0", chat, TOOLS)
        body = '{"a": 1}' if arguments is None else f'{{"name": "add", "arguments": {arguments}}}'
        assert tokenizer.decode(row.ids[row.trained]) == f"<tool_call>{body}</tool_call><eos>b<eos>"
        assert str(tokenizer.decode(row.ids)).startswith("1<|user|>a<eos>")


SETTINGS: dict[str, Any] = {
    "messages_key": "messages", "tools_key": "tools", "prompt_key": "prompt", "response_key": "response", "max_length": 512,
    "truncation": "error", "apply_chat_template_kwargs": {},
}  # fmt: skip
CHAT = [{"role": "user", "content": "a"}, called({"a": 1}, content=None), result("3"), {"role": "assistant", "content": "b"}]
OTHER = [{"role": "user", "content": "c"}, called({"other": "x"}), result("4")]


def dataset(folder: Path, rows: list[dict[str, Any]], **changes: Any) -> SFTDataset:
    tokenizer = character_tokenizer(None, with_tools=True)
    tokenizer.chat_template = TOOL_TEMPLATE.replace("map(attribute='function.name') | join(' ')", "tojson")
    return SFTDataset([str(write(rows, str(folder), "chats"))], tokenizer, **(SETTINGS | changes))


def test_null_fields_of_parquet_structs_are_dropped(tmp_path: Path) -> None:
    """The structs of both calls have the fields a and other there, and messages without calls have null ones."""
    other_tools = [{"type": "function", "function": {"name": "get", "strict": True}}]
    rows = [
        {"messages": CHAT, "tools": TOOLS},
        {"messages": OTHER, "tools": other_tools},
        {"messages": OTHER[:1] + CHAT[3:], "tools": None},
    ]
    data = dataset(tmp_path, rows)
    texts = [TINY.tokenizer.decode(data.batch([i]).tokens["input_ids"]) for i in range(3)]
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><eos>'
    assert texts[0] == (
        f"<tools>{json.dumps(TOOLS)}</tools><|user|>a<eos><|assistant|>{call}<tool_response>3</tool_response><|assistant|>b<eos>"
    )
    assert '"arguments": {"other": "x"}}' in texts[1] and texts[1].startswith(f"<tools>{json.dumps(other_tools)}</tools>")
    assert texts[2] == "<|user|>c<eos><|assistant|>b<eos>" and data.notices == ()
    as_text = [row | {"tools": row["tools"] and json.dumps(row["tools"])} for row in rows]
    again = dataset(tmp_path, as_text)
    assert texts == [TINY.tokenizer.decode(again.batch([i]).tokens["input_ids"]) for i in range(3)]


def test_calls_without_a_tools_column_are_reported(tmp_path: Path) -> None:
    rows = [{"messages": OTHER[:1] + CHAT[3:]}, {"messages": CHAT}, {"messages": OTHER}]
    (notice,) = dataset(tmp_path, rows, tools_key=None).notices
    assert (
        notice.startswith("2 of 3 conversations have tool calls, and their prompts have no tools")
        and "row 1); data.tools_key" in notice
    )


def test_a_template_that_ignores_tools_or_calls_raises() -> None:
    asked = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    bare = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<eos>{% endfor %}" + asked
    with_calls = bare.replace("{{ m.content }}", "{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}")
    for template, tools, words in ((bare, None, "tool calls"), (bare, TOOLS, "tools"), (with_calls, TOOLS, "tools")):
        tokenizer = character_tokenizer(None, with_tools=True)
        tokenizer.chat_template = template
        with pytest.raises(ValueError, match=f"row 0: the chat template does not render {words}: use a template that does"):
            TurnEncoder(tokenizer, {}).chat("row 0", CHAT, tools)


REFUSED = {
    "message 0: has tool_calls besides": ([CHAT[1] | {"role": "user", "content": ""}], None),
    "message 0: the content is a NoneType": ([{"role": "assistant", "content": None}], None),
    "message 1: tool_calls must be a list of": ([CHAT[0], called({}) | {"tool_calls": [{"name": "add"}]}], None),
    r"message 1: tool_calls must be a list of \{type": ([CHAT[0], called([1])], None),
    "the tools are not JSON": (CHAT, "add"),
    "the tools are not a list of function schemas": (CHAT, '{"name": "add"}'),
}


@pytest.mark.parametrize("words", REFUSED)
def test_anything_else_raises(words: str) -> None:
    chat, tools = REFUSED[words]
    with pytest.raises(ValueError, match=rf"^row 0[:,] {words}"):
        encoder(QWEN25).chat("row 0", chat, tools)
