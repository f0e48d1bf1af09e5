"""Assistant tokens of conversations under several kinds of chat templates."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
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
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    rows = Rows([str(tmp_path / "chats.jsonl")], ["messages"])
    return TurnEncoder(reader, kwargs).chats(rows, rows.column("messages"))


def trained(reader: PreTrainedTokenizerFast, turns: Turns) -> list[str]:
    """The text of each run of trained tokens."""
    edges = np.flatnonzero(np.diff(turns.trained.astype(int), prepend=0, append=0)).reshape(-1, 2)
    return [reader.decode(turns.ids[start:end]) for start, end in edges]


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


def test_eos_outside_of_the_marks_belongs_to_the_turn(tmp_path: Path) -> None:
    reader = tokenizer(MARKED.replace("{{ end }}{% endgeneration %}", "{% endgeneration %}{{ end }}"))
    (turns,) = encode(tmp_path, reader, CHAT)
    assert trained(reader, turns) == ["hello<eos>", "no<eos>"] and turns.n_open == 0


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
    for chat, turns in zip(chats, encode(tmp_path, reader, *chats), strict=True):
        whole = reader.apply_chat_template(chat, tokenize=False)
        assert reader.decode(turns.ids) == whole
        *first, last = (message["content"] for message in chat if message["role"] == "assistant")
        learnt = {
            QWEN3: ([f"{text}{end}" for text in first], f"<think></think>{last}{end}"),
            PHI3: ([f"{text}{end}" for text in first], f"{last}{end}\n<eos>"),
            GPT_OSS: ([f"<final>{content}" for content in first], f"<final>{last}<eos>"),
        }[template]
        assert trained(reader, turns) == [*learnt[0], learnt[1]]
        assert turns.n_open == (len(first) if template == GPT_OSS else 0), "<|end|> is where <|return|> is trained"


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([QWEN3, PHI3, GPT_OSS, ENDED + ASKED]),
    st.lists(st.sampled_from(["", "a", " a\n", "ha ha", "user", "end>"]), min_size=2, max_size=9),
)
def test_turn_is_trained_after_the_prompt_used_for_generation(template: str, texts: list[str]) -> None:
    """Each run of trained tokens starts after its turn's prompt and contains that turn's content only."""
    reader = tokenizer(template, end="<end>")
    contents = [f"{content}{i}." if content else "" for i, content in enumerate(texts)]
    chat = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    turns = TurnEncoder(reader, {}).chat("row 0", chat)
    for i in range(1, len(chat), 2):
        prompt = reader.apply_chat_template(chat[:i], tokenize=False, add_generation_prompt=True)
        start = len(reader(prompt, add_special_tokens=False)["input_ids"])
        until = start + np.flatnonzero(~np.append(turns.trained[start:], False))[0]
        text = reader.decode(turns.ids[start:until])
        assert contents[i] in text and sum(f"{other}." in text for other in range(len(chat))) == bool(contents[i])


@pytest.mark.parametrize("opens", ["<think>", "<think></think>"])
def test_turn_whose_prompt_is_no_prefix_raises(tmp_path: Path, opens: str) -> None:
    """As in DeepSeek's and Qwen3.5's prompts, which open the reasoning block."""
    reader = tokenizer(QWEN3.replace("<|assistant|>{% endif %}", f"<|assistant|>{opens}{{% endif %}}"))
    with pytest.raises(
        ValueError, match=r"chats\.jsonl, row 1, message 2: the assistant's tokens .* is not a prefix of the whole conversation"
    ):
        encode(tmp_path, reader, [CHAT[1]], CHAT)


def test_token_that_spans_the_end_of_a_turn_raises(tmp_path: Path) -> None:
    reader = tokenizer(QWEN3.replace("{{ end }}", "o"), end="")
    reader.add_tokens(["oo"])
    with pytest.raises(ValueError, match=r"row 0, message 2: .* a token spans the end of the turn; mark them"):
        encode(tmp_path, reader, CHAT)


def test_generation_marks_take_precedence(tmp_path: Path) -> None:
    marked = tokenizer(MARKED.replace("{% generation %}", "{% generation %}{% if loop.last %}<think>{% endif %}"))
    assert trained(marked, encode(tmp_path, marked, CHAT)[0]) == ["hello<eos>", "<think>no<eos>"]


REFUSED = {
    "not a conversation": [],
    "message 1: the role is 'tool'; supported are system, developer": [CHAT[1], {"role": "tool", "content": "x"}],
    "message 0: the content is a list; only text": [{"role": "user", "content": ["a picture"]}],
    "message 1: has reasoning_content besides": [CHAT[1], {"role": "assistant", "content": "a", "reasoning_content": "hm"}],
    "message 1: has tool_calls besides": [CHAT[1], {"role": "assistant", "content": "a", "tool_calls": [{"name": "f"}]}],
}


@pytest.mark.parametrize("words", REFUSED)
def test_content_other_than_text_raises(tmp_path: Path, words: str) -> None:
    with pytest.raises(ValueError, match=rf"chats\.jsonl, row 0[:,].*{words}"):
        encode(tmp_path, tokenizer(ENDED + ASKED), REFUSED[words])


def test_messages_that_a_template_rejects_raise_with_their_row(tmp_path: Path) -> None:
    reader = tokenizer("{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}" + ENDED)
    with pytest.raises(ValueError, match=r"row 0: the chat template rejects it: user first"):
        encode(tmp_path, reader, CHAT)
