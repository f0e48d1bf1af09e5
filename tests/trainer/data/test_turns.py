"""Assistant tokens of conversations under several kinds of chat templates."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from tests.trainer.data.tokenizers import byte_tokenizer
from trainer.data.files import Rows
from trainer.data.turns import TurnEncoder, Turns

ENDED = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ end }}{{ line }}{% endfor %}"
ASKED = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{{ end }}{% endgeneration %}{% else %}{{ m.content }}{{ end }}{% endif %}"
    "{{ line }}{% endfor %}"
)
OUTSIDE = MARKED.replace("{{ end }}{% endgeneration %}", "{% endgeneration %}{{ end }}")
APART = OUTSIDE.replace(
    "{{ m.content }}{% end", "{{ m.content[0] }}{% endgeneration %}~{% generation %}{{ m.content[1:] }}{% end"
)
# Like Qwen3 (empty thoughts in the last turn only), Phi-3 (EOS after the conversation) and GPT-OSS (other last end token).
QWEN3 = (
    ENDED.replace("{{ m.content }}", "{% if loop.last and m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}")
    + ASKED
)
PHI3 = ENDED + "{% if add_generation_prompt %}<|assistant|>{% else %}<eos>{% endif %}"
GPT_OSS = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}<final>{% endif %}{{ m.content }}"
    "{% if loop.last and m.role == 'assistant' %}<eos>{% else %}{{ end }}{% endif %}{% endfor %}" + ASKED
)
CHAT = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "no"},
]


def tokenizer(template: str, *, end: str = "<eos>", line: str = "{{ '\\n' }}") -> PreTrainedTokenizerFast:
    made = byte_tokenizer(chat_template=template.replace("{{ end }}", end).replace("{{ line }}", line))
    if end == "<end>":
        made.add_special_tokens({"additional_special_tokens": ["<end>"]})
    return made


def encode(tmp_path: Path, reader: PreTrainedTokenizerFast, *chats: Any, **kwargs: Any) -> list[Turns]:
    """Conversations of one row each."""
    rows = encode_rows(tmp_path, reader, *chats, **kwargs)
    assert all(len(parts) == 1 for parts in rows)
    return [parts[0] for parts in rows]


def encode_rows(tmp_path: Path, reader: PreTrainedTokenizerFast, *chats: Any, **kwargs: Any) -> list[list[Turns]]:
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    rows = Rows([str(tmp_path / "chats.jsonl")], ["messages"])
    return TurnEncoder(reader, kwargs).chats(rows, rows.column("messages"))


def runs_of(reader: PreTrainedTokenizerFast, turns: Turns) -> list[tuple[int, str]]:
    """Start and text of each run of trained tokens."""
    edges = np.flatnonzero(np.diff(turns.trained.astype(int), prepend=0, append=0)).reshape(-1, 2)
    return [(start, reader.decode(turns.ids[start:end])) for start, end in edges]


def trained(reader: PreTrainedTokenizerFast, turns: Turns) -> list[str]:
    return [text for _, text in runs_of(reader, turns)]


@pytest.mark.parametrize("template", [ENDED + ASKED, MARKED + ASKED], ids=["prefixes", "marks"])
@pytest.mark.parametrize("end", ["<eos>", "<end>"])
def test_assistant_turns_and_their_ends_are_trained(tmp_path: Path, template: str, end: str) -> None:
    reader = tokenizer(template, end=end)
    (turns,) = encode(tmp_path, reader, CHAT)
    text = "".join(f"<|{message['role']}|>{message['content']}{end}\n" for message in CHAT)
    assert reader.decode(turns.ids) == text and turns.ids.dtype == np.int64
    assert trained(reader, turns) == [f"hello{end}", f"no{end}"]
    assert (turns.n_turns, turns.n_empty, turns.n_open) == (2, 0, 0)
    assert reader.decode(turns.up_to_the_end()) == text.removesuffix("\n")


@pytest.mark.parametrize("end", ["<eos>", "<end>", " <end>"])
def test_end_token_outside_of_the_marks_belongs_to_the_turn(tmp_path: Path, end: str) -> None:
    reader = tokenizer(OUTSIDE, end=end)
    reader.add_special_tokens({"additional_special_tokens": ["<end>"]})
    first, second = encode(tmp_path, reader, CHAT, CHAT[:-1])
    assert trained(reader, first) == [f"hello{end}", f"no{end}"] and trained(reader, second) == [f"hello{end}"]
    assert reader.decode(first.ids) == reader.apply_chat_template(CHAT, tokenize=False)
    assert (first.n_open, second.n_open) == (0, 0)


def test_blank_turn_ends_with_the_token_of_the_others(tmp_path: Path) -> None:
    """A reward model reads the score of every response at the same token."""
    reader = tokenizer(OUTSIDE, end="<end>")
    reader.add_special_tokens({"additional_special_tokens": ["<end>"]})
    blank = [*CHAT[:2], {"role": "assistant", "content": "\n"}]
    (turns,) = encode(tmp_path, reader, blank)
    assert trained(reader, turns) == ["\n<end>"] and turns.n_open == 0
    with pytest.raises(ValueError, match="row 0: the chat template marks no token of the last turn"):
        TurnEncoder(reader, {}).chat("row 0", [*CHAT[:2], {"role": "assistant", "content": ""}], last=True)


def test_start_of_the_next_message_is_not_the_end_of_a_turn(tmp_path: Path) -> None:
    """The template ends no turn, and a role begins with a special token. EOS follows the last turn, not its newline."""
    reader = tokenizer(MARKED, end="")
    reader.add_special_tokens({"additional_special_tokens": ["<|user|>"]})
    first, second = encode(tmp_path, reader, CHAT, CHAT[:-1])
    assert trained(reader, first) == ["hello", "no<eos>"] and trained(reader, second) == ["hello"]
    assert reader.decode(first.ids) == reader.apply_chat_template(CHAT, tokenize=False).removesuffix("\n") + "<eos>"
    assert (first.n_open, second.n_open) == (1, 1)


def test_text_between_the_marks_and_the_end_of_a_turn_raises(tmp_path: Path) -> None:
    reader = tokenizer(OUTSIDE, end="</a><eos>")
    with pytest.raises(
        ValueError, match=r"row 0: the chat template writes '</a><eos>' after the tokens .* it marks, so it is not"
    ):
        encode(tmp_path, reader, CHAT)


def test_last_turn_of_several_marked_spans_begins_with_the_first(tmp_path: Path) -> None:
    reader = tokenizer(APART, end="<end>")
    (turns,) = encode(tmp_path, reader, CHAT)
    assert trained(reader, turns) == ["h", "ello<end>", "n", "o<end>"] and turns.n_open == 0
    for chat, response in ((CHAT, "n~o<end>"), (CHAT[1:3], "h~ello<end>"), ([*CHAT[:2], CHAT[4]], "n~o<end>")):
        (row,) = TurnEncoder(reader, {}).chat("row 0", chat, last=True)
        assert reader.decode(row.up_to_the_end()[row.last_turn() :]) == response


def test_spans_that_may_be_of_any_turn_raise_if_the_last_turn_is_asked_for() -> None:
    """The earlier turn has a span more where it is not followed by another one."""
    marked = "{% generation %}{{ m.content }}{{ end }}{% endgeneration %}"
    either = f"{{% if m is sameas messages[-1] or messages | length == 4 %}}{marked}~{{% endif %}}{marked}"
    reader = tokenizer(MARKED.replace(marked, either), end="<end>")
    assert trained(reader, TurnEncoder(reader, {}).chat("row 0", CHAT)[0]) == ["hello<end>", "no<end>", "no<end>"]
    with pytest.raises(ValueError, match="row 0: the chat template marks 3 spans of tokens in 2 assistant turns, and not which"):
        TurnEncoder(reader, {}).chat("row 0", CHAT, last=True)


def test_eos_ends_the_last_turn_if_the_template_ends_none(tmp_path: Path) -> None:
    for template in (ENDED + ASKED, MARKED):
        reader = tokenizer(template, end="", line="")
        first, second = encode(tmp_path, reader, CHAT, CHAT[:-1])
        assert trained(reader, first) == ["hello", "no<eos>"] and reader.decode(first.ids).endswith("no<eos>")
        assert (first.n_open, second.n_open) == (1, 1) and trained(reader, second) == ["hello"]


def test_conversation_may_end_with_the_user_and_have_empty_turns(tmp_path: Path) -> None:
    reader = tokenizer(ENDED + ASKED)
    asked, silent, none = encode(tmp_path, reader, CHAT[:4], [CHAT[1], {"role": "assistant", "content": ""}], CHAT[:2])
    assert trained(reader, asked) == ["hello<eos>"] and reader.decode(asked.up_to_the_end()).endswith("hello<eos>")
    assert trained(reader, silent) == ["<eos>"] and silent.n_empty == 1
    assert trained(reader, none) == [] and none.n_turns == 0


def test_template_gets_its_arguments(tmp_path: Path) -> None:
    reader = tokenizer("{{ head }}" + ENDED + ASKED)
    (turns,) = encode(tmp_path, reader, CHAT, head="!")
    assert reader.decode(turns.ids).startswith("!<|system|>") and trained(reader, turns) == ["hello<eos>", "no<eos>"]


@pytest.mark.parametrize(("template", "end"), [(QWEN3, "<end>"), (QWEN3, "<eos>"), (PHI3, "<end>"), (GPT_OSS, "<end>")])
def test_turns_of_a_template_that_renders_the_last_one_differently_are_trained(tmp_path: Path, template: str, end: str) -> None:
    reader = tokenizer(template, end=end)
    chats = [CHAT, CHAT[1:], [*CHAT[1:3], *CHAT[1:]], [*CHAT[1:], *CHAT[3:], *CHAT[3:]]]
    for chat, rows in zip(chats, encode_rows(tmp_path, reader, *chats), strict=True):
        turns = [i for i, message in enumerate(chat) if message["role"] == "assistant"]
        ends = turns[-1:] if template == PHI3 else turns
        assert [reader.decode(row.ids) for row in rows] == [
            reader.apply_chat_template(chat[: i + 1], tokenize=False) for i in ends
        ]
        *first, last = (chat[i]["content"] for i in turns)
        learnt = {
            QWEN3: [f"<think></think>{text}{end}" for text in (*first, last)],
            PHI3: [*(f"{text}{end}" for text in first), f"{last}{end}\n<eos>"],
            GPT_OSS: [f"<final>{content}<eos>" for content in (*first, last)],
        }[template]
        assert [text for row in rows for text in trained(reader, row)] == learnt
        assert [row.n_turns for row in rows] == ([len(turns)] if template == PHI3 else [1] * len(turns))
        assert not any(row.n_open for row in rows)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([QWEN3, PHI3, GPT_OSS, ENDED + ASKED]),
    st.lists(st.sampled_from(["", "a", " a\n", "ha ha", "user", "end>"]), min_size=2, max_size=9),
)
def test_turn_is_trained_after_the_prompt_used_for_generation(template: str, texts: list[str]) -> None:
    """Runs of trained tokens are the turns, in order: each starts after its prompt and contains that turn's content only."""
    reader = tokenizer(template, end="<end>")
    contents = [f"{content}{i}." if content else "" for i, content in enumerate(texts)]
    chat = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    runs = [(row, place, text) for row in TurnEncoder(reader, {}).chat("row 0", chat) for place, text in runs_of(reader, row)]
    for i, (row, start, text) in zip(range(1, len(chat), 2), runs, strict=True):
        prompt = reader.apply_chat_template(chat[:i], add_generation_prompt=True)["input_ids"]
        assert row.ids[:start].tolist() == prompt
        assert contents[i] in text and sum(f"{other}." in text for other in range(len(chat))) == bool(contents[i])
        assert ("<eos>" if template == GPT_OSS else "<end>") in text


def test_end_token_may_take_the_white_space_after_it(tmp_path: Path) -> None:
    """As Phi-3's: the newline after it has no token, and what is written after the last turn follows directly."""
    reader = byte_tokenizer(chat_template=PHI3.replace("{{ end }}", "<end>").replace("{{ line }}", "{{ '\\n' }}"))
    reader.add_special_tokens({"additional_special_tokens": [AddedToken("<end>", rstrip=True)]})
    (turns,) = encode(tmp_path, reader, CHAT)
    assert trained(reader, turns) == ["hello<end>", "no<end><eos>"]
    assert turns.ids.tolist() == reader.apply_chat_template(CHAT)["input_ids"]


@pytest.mark.parametrize("opens", ["<think>", "<think></think>"])
def test_prompt_may_open_what_the_template_leaves_out_of_earlier_turns(tmp_path: Path, opens: str) -> None:
    """As Qwen3.5's, and Qwen3's with enable_thinking=false."""
    reader = tokenizer(QWEN3.replace("<|assistant|>{% endif %}", f"<|assistant|>{opens}{{% endif %}}"))
    (rows,) = encode_rows(tmp_path, reader, CHAT)
    rest = "<think></think>".removeprefix(opens)
    assert [trained(reader, row) for row in rows] == [[f"{rest}hello<eos>"], [f"{rest}no<eos>"]]


def test_turn_that_does_not_continue_its_prompt_raises(tmp_path: Path) -> None:
    """As DeepSeek-R1's, whose prompt opens the thinking that its turns are rendered without."""
    reader = tokenizer(ENDED + ASKED.replace("<|assistant|>", "<|assistant|><think>"))
    with pytest.raises(ValueError) as error:
        encode_rows(tmp_path, reader, [CHAT[1]], CHAT)
    text = str(error.value)
    assert "chats.jsonl, row 1, message 2: it does not continue its own prompt" in text and "\n" not in text
    assert "the chat template rendered '<think>' after " in text and "and now 'hello<eos>" in text and "{% generation %}" in text


def test_token_across_the_end_of_the_prompt_is_not_trained(tmp_path: Path) -> None:
    """RL samples a turn after the tokens of its prompt; the tokens of the whole text would begin with another one."""
    reader = tokenizer(ENDED + ASKED, end="<end>")
    reader.add_tokens([">h"])
    chat = [*CHAT[1:3], *CHAT[3:]]
    prompts = [reader.apply_chat_template(chat[:i], add_generation_prompt=True)["input_ids"] for i in (1, 3)]
    rows = encode_rows(tmp_path, reader, chat)[0]
    assert [trained(reader, row) for row in rows] == [["hello<end>"], ["no<end>"]], "the second prompt has the other token"
    assert [row.ids[: len(prompt)].tolist() for row, prompt in zip(rows, prompts, strict=True)] == prompts
    (row,) = encode_rows(tmp_path, reader, CHAT[3:])[0]
    assert row.ids.tolist() == reader.apply_chat_template(CHAT[3:])["input_ids"]


def test_only_the_last_turn_has_to_continue_its_prompt(tmp_path: Path) -> None:
    """For preference pairs, in which earlier turns are context."""
    reader = tokenizer(QWEN3.replace("<|assistant|>{% endif", "<|assistant|>{% if messages | length == 1 %}!{% endif %}{% endif"))
    encoder, chat = TurnEncoder(reader, {}), CHAT[1:]
    (row,) = encoder.chat("row 0", chat, last=True)
    assert reader.decode(row.ids) == reader.apply_chat_template(chat, tokenize=False)
    assert trained(reader, row) == ["<think></think>no<eos>"] and row.n_turns == 1
    with pytest.raises(ValueError, match="row 0, message 1: it does not continue its own prompt"):
        encoder.chat("row 0", chat)


def test_generation_marks_take_precedence(tmp_path: Path) -> None:
    marked = tokenizer(MARKED.replace("{% generation %}", "{% generation %}{% if loop.last %}<think>{% endif %}"))
    assert trained(marked, encode(tmp_path, marked, CHAT)[0]) == ["hello<eos>", "<think>no<eos>"]


REFUSED = {
    "not a conversation": [],
    "message 1: the role is 'function'; supported are system, developer": [CHAT[1], {"role": "function", "content": "x"}],
    r"message 1: tool_calls: character \d+ is '\\ud800', half of a surrogate pair": [
        CHAT[1],
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"x": "\ud800"}}}]},
    ],
    "message 0: the content is a list; only text": [{"role": "user", "content": ["a picture"]}],
    "message 1: has reasoning_content besides": [CHAT[1], {"role": "assistant", "content": "a", "reasoning_content": "hm"}],
}


@pytest.mark.parametrize("words", REFUSED)
def test_content_other_than_text_raises(tmp_path: Path, words: str) -> None:
    with pytest.raises(ValueError, match=rf"chats\.jsonl, row 0[:,].*{words}"):
        encode(tmp_path, tokenizer(ENDED + ASKED), REFUSED[words])


def test_messages_that_a_template_rejects_raise_with_their_row(tmp_path: Path) -> None:
    reader = tokenizer("{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}" + ENDED)
    with pytest.raises(ValueError, match=r"row 0: the chat template rejects it: user first"):
        encode(tmp_path, reader, CHAT)
