"""Prompts and responses encoded for another model."""

from pathlib import Path

import pytest

from data_preprocess.tiny_model import character_tokenizer
from tests.reward_models import CHAT
from tests.trainer.data.tokenizers import byte_tokenizer
from trainer.rewards.conversations import Conversations, same_tokenizer, with_template

ASKED = [{"role": "system", "content": "s"}, {"role": "user", "content": "1+1"}]


@pytest.mark.parametrize(("finished", "end"), [(True, "<eos>"), (False, "")])
def test_chat_messages_become_a_conversation_up_to_the_end_of_the_response(finished: bool, end: str) -> None:
    """A newline after the last turn is excluded; a truncated response has no end token."""
    tokenizer = byte_tokenizer(chat_template=CHAT)
    ids = Conversations(tokenizer, {}).ids(ASKED, "2 <pad>", finished=finished)
    text = f"<system>s<eos>\n<user>1+1<eos>\n<assistant>2 <pad>{end}"
    assert ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_earlier_turns_may_be_rendered_differently() -> None:
    """As Qwen3's, whose last turn alone has a thinking block."""
    last = CHAT.replace("{{ m['content'] }}", "{% if loop.last and m['role'] == 'assistant' %}!{% endif %}{{ m['content'] }}")
    encoder = Conversations(byte_tokenizer(chat_template=last), {})
    asked = [*ASKED, {"role": "assistant", "content": "2"}, {"role": "user", "content": "2+1"}]
    text = "<system>s<eos>\n<user>1+1<eos>\n<assistant>2<eos>\n<user>2+1<eos>\n<assistant>!3<eos>"
    assert encoder.tokenizer.decode(encoder.ids(asked, "3", finished=True)) == text
    opened = CHAT.replace("<assistant>{% endif", "<assistant>{% if messages | length < 3 %}!{% endif %}{% endif")
    encoder = Conversations(byte_tokenizer(chat_template=opened), {})
    text = text.replace("!", "")
    assert encoder.tokenizer.decode(encoder.ids(asked, "3", finished=True)) == text, "the first turn does not continue its prompt"


@pytest.mark.parametrize(("finished", "end"), [(True, "<eos>"), (False, "")])
def test_plain_text_has_bos_before_it_and_eos_after_the_response(finished: bool, end: str) -> None:
    tokenizer = byte_tokenizer(chat_template=None, bos=True)
    ids = Conversations(tokenizer, {}).ids("1+1", "2", finished=finished)
    assert ids.tolist() == tokenizer(f"<eos>1+12{end}", add_special_tokens=False)["input_ids"]


def test_template_without_ends_of_turns_gets_eos_and_its_arguments() -> None:
    tokenizer = byte_tokenizer(chat_template="{{ mood }}{% for m in messages %}[{{ m['content'] }}]{% endfor %}")
    ids = Conversations(tokenizer, {"mood": "kind"}).ids(ASKED, "2", finished=True)
    assert tokenizer.decode(ids) == "kind[s][1+1][2]<eos>"
    assert tokenizer.decode(Conversations(tokenizer, {}).ids(ASKED, "", finished=False)) == "[s][1+1][]"


@pytest.mark.parametrize(("finished", "end"), [(True, "<eos>"), (False, "")])
def test_session_is_rendered_up_to_its_last_turn_without_thinking(finished: bool, end: str) -> None:
    calls = CHAT.replace(
        "{{ m['content'] }}", "{{ m['content'] }}{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}"
    )
    encoder = Conversations(byte_tokenizer(chat_template=calls), {})
    call = {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    turns = [
        {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "content": "2", "tool_call_id": "call_0"},
        {"role": "assistant", "content": "2", "reasoning_content": "so"},
        {"role": "user", "content": "thanks"},
    ]
    text = f"<system>s<eos>\n<user>1+1<eos>\n<assistant>[add]<eos>\n<tool>2<eos>\n<assistant>2{end}"
    assert encoder.tokenizer.decode(encoder.ids_of_session([*ASKED, *turns], finished=finished)) == text
    with pytest.raises(ValueError, match="no turn of the model"):
        encoder.ids_of_session(ASKED, finished=True)


def test_messages_that_a_template_rejects_raise() -> None:
    strict = byte_tokenizer(chat_template="{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}")
    with pytest.raises(ValueError, match="the conversation: the chat template rejects it: no system"):
        Conversations(strict, {}).ids(ASKED, "2", finished=True)
    with pytest.raises(ValueError, match="has no chat template"):
        Conversations(byte_tokenizer(chat_template=None), {}).ids(ASKED, "2", finished=True)
    with pytest.raises(ValueError, match="the conversation, message 0: the role is 'critic'"):
        Conversations(byte_tokenizer(), {}).ids([{"role": "critic", "content": "x"}], "2", finished=True)


def test_same_words_detects_every_difference_between_tokenizers(tmp_path: Path) -> None:
    one = byte_tokenizer()
    assert same_tokenizer(one, byte_tokenizer())
    used = byte_tokenizer()
    used(["a", "abc"], padding=True, truncation=True, max_length=2)
    assert same_tokenizer(one, used), "truncation and padding of an earlier call are ignored"
    other_end = byte_tokenizer()
    other_end.eos_token = "<pad>"
    others = [character_tokenizer("0123"), byte_tokenizer(chat_template=CHAT), byte_tokenizer(bos=True), other_end]
    assert not any(same_tokenizer(one, other) for other in others)
    (tmp_path / "chat.jinja").write_text(CHAT)
    assert same_tokenizer(with_template(one, str(tmp_path / "chat.jinja")), byte_tokenizer(chat_template=CHAT))
    with pytest.raises(ValueError, match=r"chat_template=/no/such\.jinja: no such file"):
        with_template(one, "/no/such.jinja")
