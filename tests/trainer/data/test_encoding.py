import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.data.tokenizers import byte_tokenizer
from trainer.data.encoding import Refused, encode, parsed, render, token_ids, truncate, with_texts
from trainer.data.seam import Seams

CHAT = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]


def test_template_ends_where_the_response_begins() -> None:
    tokenizer = byte_tokenizer()
    assert render(tokenizer, CHAT, {}) == "<system>S<user>U<a>"
    assert render(tokenizer, CHAT, {"tail": "!"}) == "<system>S<user>U<a>!"
    assert render(tokenizer, CHAT, {"add_generation_prompt": False}) == "<system>S<user>U"
    assert render(tokenizer, "<user>as it is", {"tail": "!"}) == "<user>as it is"


def test_chat_messages_without_a_template_raise_with_a_remedy() -> None:
    tokenizer = byte_tokenizer(chat_template=None)
    assert render(tokenizer, "plain", {}) == "plain"
    with pytest.raises(ValueError, match=r"has no chat template.*tokenizer_path.*chat_template\.jinja.*plain strings"):
        render(tokenizer, CHAT, {})


def test_encode_keeps_order_and_gives_bos_to_plain_text_alone() -> None:
    tokenizer = byte_tokenizer(bos=True)
    prompts: list[Any] = ["ab", CHAT, "", [{"role": "user", "content": "é"}], "c"]
    encoded = encode(tokenizer, prompts, {})
    assert [text for text, _ in encoded] == ["ab", "<system>S<user>U<a>", "", "<user>é<a>", "c"]
    bos = tokenizer.eos_token
    assert [tokenizer.decode(ids) for _, ids in encoded] == [f"{bos}ab", "<system>S<user>U<a>", bos, "<user>é<a>", f"{bos}c"]
    assert all(ids.dtype == np.int32 for _, ids in encoded)


def test_encode_of_many_equals_one_by_one() -> None:
    tokenizer = byte_tokenizer(bos=True)
    prompts: list[Any] = [f"text {i}" if i % 3 else [{"role": "user", "content": str(i)}] for i in range(2100)]
    for prompt, (text, ids) in zip(prompts, encode(tokenizer, prompts, {}), strict=True):
        assert text == render(tokenizer, prompt, {})
        assert ids.tolist() == tokenizer(text, add_special_tokens=isinstance(prompt, str))["input_ids"]
    assert token_ids(tokenizer, [], special=False) == []


@given(st.lists(st.integers(0, 9), max_size=20), st.integers(1, 20))
def test_truncation_removes_the_named_part(tokens: list[int], limit: int) -> None:
    ids = np.array(tokens, dtype=np.int32)
    over = max(0, len(tokens) - limit)
    assert truncate(ids, limit, "left").tolist() == tokens[over:]
    assert truncate(ids, limit, "right").tolist() == tokens[: len(tokens) - over]
    middle = truncate(ids, limit, "middle").tolist()
    assert len(middle) == len(tokens) - over
    if over:
        assert middle == tokens[: limit // 2] + tokens[len(tokens) - (limit - limit // 2) :]


def test_module_loads_no_torch() -> None:
    """Every process of the filter imports the module: 0.1 s instead of 3."""
    code = (
        "import sys, trainer.data.encoding, trainer.data.turns; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


CALLING = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% if 'tool_calls' in m %}{% for call in m.tool_calls %}[{{ call.function.arguments | tojson }}]{% endfor %}{% endif %}"
    "{% endfor %}<a>"
)


def test_prompts_with_calls_are_rendered_as_conversations_are() -> None:
    """Arguments are values, and fields that are null, as a parquet file has them, are not there."""
    call = {"function": {"name": "add", "arguments": '{"a": 1}'}}
    plain = {"role": "user", "content": "U", "tool_calls": None, "tool_call_id": None}
    messages = [plain, {"role": "assistant", "content": None, "tool_calls": [call], "tool_call_id": None}]
    tokenizer = byte_tokenizer(chat_template=CALLING)
    (text, ids), (alone, _) = encode(tokenizer, [messages, [plain]], {})
    assert text == '<user>U<assistant>[{"a": 1}]<a>' and alone == "<user>U<a>"
    assert text == Seams(tokenizer, {}).render_calls(parsed(messages), None, prompt=True)
    assert tokenizer.decode(ids) == text
    other = {"function": {"name": "add", "arguments": {"a": 1, "query": None}}}  # a field of another tool's arguments
    of_parquet = [plain, {"role": "assistant", "content": None, "tool_calls": [other]}]
    strict = byte_tokenizer(chat_template=CALLING.replace("m.content or ''", "m.content"))
    assert encode(strict, [of_parquet], {})[0][0] == text
    wants_text = byte_tokenizer(chat_template=CALLING.replace("arguments | tojson", "arguments + '!'"))
    assert encode(wants_text, [messages], {})[0][0] == '<user>U<assistant>[{"a": 1}!]<a>'


@pytest.mark.parametrize("prompt", ["ab\ud800", [{"role": "user", "content": "\udc00"}]])
def test_half_of_a_surrogate_pair_is_refused(prompt: Any) -> None:
    with pytest.raises(Refused, match=r"^character \d is '\\ud[8c]00', half of a surrogate pair, which is no text; replace it$"):
        encode(byte_tokenizer(), [CHAT, "é", prompt], {})


NOT_MESSAGES = {
    "the prompt has no message": [],
    "message 1: it is 'b'; expected a message {role, content}": [CHAT[0], "b"],
    "message 0: it is 5; expected a message {role, content}": [5, 6],
    "message 0: the role is None; must be text, such as user": [{"content": "U"}],
    "message 1: the role is 1; must be text, such as user": [CHAT[0], {"role": 1, "content": "U"}],
    "message 0: the content is a NoneType; only text is supported": [{"role": "user"}],
    "message 1: the content is a NoneType; only text is supported": [
        CHAT[0],
        {"role": "user", "content": None, "tool_calls": []},
    ],
    "message 0: the content is a int; only text is supported": [{"role": "user", "content": 5}],
    "message 0: the content is a list; only text is supported": [{"role": "user", "content": [{"type": "image", "image": "hi"}]}],
}


def test_parts_of_text_are_one_text() -> None:
    """As of OpenAI's API; in a parquet file parts have the fields of other kinds of parts, as nulls."""
    parts = [{"type": "text", "text": "U", "image": None}, {"type": "text", "text": "V", "image": None}]
    (text, ids), (expected, same) = encode(
        byte_tokenizer(), [[{"role": "user", "content": parts}], [{"role": "user", "content": "UV"}]], {}
    )
    assert text == expected and ids.tolist() == same.tolist()
    assert with_texts([{"role": "user", "content": [*parts, {"type": "image"}]}])[0]["content"] == [*parts, {"type": "image"}]


@pytest.mark.parametrize("words", NOT_MESSAGES)
def test_messages_without_role_or_text_are_refused(words: str) -> None:
    """Templates would render them as some text: None, a Python list, nothing."""
    lenient = byte_tokenizer(chat_template="{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<a>")
    prompts: list[Any] = [CHAT, NOT_MESSAGES[words]]
    with pytest.raises(Refused, match=f"^{re.escape(words)}"):
        encode(lenient, prompts, {})


@pytest.mark.parametrize("prompt", [None, 5, [{"role": "user", "content": "U", "tool_calls": [5], "name": b"x"}]])
def test_what_is_no_conversation_is_refused(prompt: Any) -> None:
    with pytest.raises(Refused):
        encode(byte_tokenizer(chat_template=CALLING), [prompt], {})
