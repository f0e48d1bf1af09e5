import json
from pathlib import Path
from typing import Any

import pytest
import torch

from data_preprocess.writer import sft_row, write
from tests.trainer.data.tokenizers import byte_tokenizer
from trainer.data.sft_dataset import SFTDataset

TOKENIZER = byte_tokenizer()
SETTINGS: dict[str, Any] = {
    "messages_key": None,
    "tools_key": None,
    "prompt_key": "prompt",
    "response_key": "response",
    "max_length": 64,
    "truncation": "error",
    "apply_chat_template_kwargs": {},
}

CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}]
ENDED = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def make(tmp_path: Path) -> Any:
    def dataset(*pairs: tuple[str, str], **changes: Any) -> SFTDataset:
        path = write([sft_row(*pair) for pair in pairs], str(tmp_path), "sft")
        return SFTDataset([str(path)], TOKENIZER, **(SETTINGS | changes))

    return dataset


def trained(data: SFTDataset, index: int) -> tuple[str, str]:
    """The row as text, and its trained tokens as text."""
    batch = data.batch([index])
    ids = batch.tokens["input_ids"]
    return TOKENIZER.decode(ids), TOKENIZER.decode(ids[batch.tokens["response_mask"].bool()])


def test_response_and_its_eos_are_trained(make: Any) -> None:
    data = make(("502913=", "012359"), ("1", ""))
    assert trained(data, 0) == ("<user>502913=<a>012359<eos>", "012359<eos>")
    assert trained(data, 1) == ("<user>1<a><eos>", "<eos>")
    (notice,) = data.notices
    assert notice.startswith("1 of 2 rows have an empty response: only its end token") and "sft.parquet, row 1)" in notice


def test_batch_is_flat_and_in_the_requested_order(make: Any) -> None:
    data = make(("a", "b"), ("cc", "dd"), ("eee", "fff"))
    batch = data.batch([2, 0])
    assert batch.lengths.tolist() == [9 + 3 + 3 + 1, 9 + 1 + 1 + 1] and batch.rows["uid"].tolist() == [2, 0]
    assert batch.tokens["input_ids"].dtype == torch.int64 and batch.tokens["response_mask"].dtype == torch.float32
    assert [TOKENIZER.decode(ids) for ids in batch.split_rows("input_ids")] == ["<user>eee<a>fff<eos>", "<user>a<a>b<eos>"]
    assert [mask.sum().item() for mask in batch.split_rows("response_mask")] == [4, 2]
    assert len(data.batch(range(3))) == len(data) == 3


def test_prompt_is_encoded_as_in_ppo(make: Any) -> None:
    assert trained(make(("p", "r"), apply_chat_template_kwargs={"tail": "!"}), 0) == ("<user>p<a>!r<eos>", "r<eos>")


def test_plain_prompts_and_other_columns(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "2+2=", "answer": "4"}\n')
    data = SFTDataset([str(file)], TOKENIZER, **(SETTINGS | {"prompt_key": "question", "response_key": "answer"}))
    assert trained(data, 0) == ("2+2=4<eos>", "4<eos>")
    with pytest.raises(ValueError, match=r"rows\.jsonl: no column 'prompt'; it has question, answer"):
        SFTDataset([str(file)], TOKENIZER, **SETTINGS)


def test_too_long_row_is_an_error_or_truncated(make: Any) -> None:
    pairs = [("12345", "abcdef"), ("1", "2")]  # 9 + 5 + 6 + 1 = 21 tokens; 9 + 1 + 1 + 1 = 12
    assert make(*pairs, max_length=21).notices == ()
    with pytest.raises(ValueError, match=r"sft\.parquet, row 0: 21 tokens with EOS, data\.max_length is 20"):
        make(*pairs, max_length=20)
    right = make(*pairs, max_length=18, truncation="right")
    assert trained(right, 0) == ("<user>12345<a>abcd", "abcd") and trained(right, 1) == ("<user>1<a>2<eos>", "2<eos>")
    assert "1 of 2 rows are longer than data.max_length=18 tokens and are truncated (data.truncation=right)" in right.notices[0]
    assert "0 of them keep no token" in right.notices[0]
    assert trained(make(*pairs, max_length=18, truncation="left"), 0) == ("er>12345<a>abcdef<eos>", "abcdef<eos>")
    assert "1 of them keep no token" in make(*pairs, max_length=14, truncation="right").notices[0]
    assert right.whole == [False, True] and make(*pairs, max_length=18, truncation="left").whole == [True, True]


def test_the_first_token_is_never_trained(make: Any) -> None:
    data = make(("12345", "abcdef"), max_length=5, truncation="left")
    assert trained(data, 0) == ("cdef<eos>", "def<eos>") and data.whole == [False]


def test_token_outside_the_vocabulary_raises_with_its_row(make: Any) -> None:
    data = make(("a", "b"), ("a", "~b"), ("a", "c"))
    largest = int(data.batch([1]).tokens["input_ids"].max())
    data.check_tokens(largest + 1, "model")
    with pytest.raises(
        ValueError, match=rf"row 1: it contains token {largest}, .* has {largest}; set model\.tokenizer_path to the"
    ):
        data.check_tokens(largest, "model")


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"prompt": "a\ud800", "response": "b"}, "row 1: character 1 is"),
        ({"prompt": [{"role": "user", "content": "\ud800"}], "response": "b"}, "row 1: character 6 is"),
        ({"prompt": "a", "response": "b\ud800"}, "row 1: the response: character 1 is"),
        ({"messages": [CHAT[0], CHAT[1] | {"content": "\ud800"}]}, "row 1, message 1: character 0 is"),
    ],
)
def test_half_of_a_surrogate_pair_raises_with_its_row(tmp_path: Path, row: dict[str, Any], what: str) -> None:
    keys = {"messages_key": "messages"} if "messages" in row else {}
    good = {"messages": CHAT, "prompt": "a", "response": "b"}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in (good, row)))
    with pytest.raises(ValueError, match=rf"rows\.jsonl, {what} '\\ud800', half of a surrogate pair"):
        SFTDataset([str(tmp_path / "rows.jsonl")], byte_tokenizer(chat_template=ENDED), **(SETTINGS | keys))


def test_tokenizer_without_eos_raises(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    path = write([sft_row("a", "b")], str(tmp_path), "sft")
    with pytest.raises(ValueError, match="no EOS token"):
        SFTDataset([str(path)], tokenizer, **SETTINGS)


def conversations(folder: Path, *chats: list[dict[str, str]], template: str = ENDED, **changes: Any) -> SFTDataset:
    path = write([{"messages": chat} for chat in chats], str(folder), "chats")
    return SFTDataset([str(path)], byte_tokenizer(chat_template=template), **(SETTINGS | {"messages_key": "messages"} | changes))


def test_assistant_turns_of_conversations_are_trained(tmp_path: Path) -> None:
    data = conversations(tmp_path, CHAT[:1], [*CHAT, *CHAT], CHAT)
    assert trained(data, 0) == ("<user>a<eos><assistant>bc<eos>" * 2, "bc<eos>bc<eos>")
    assert data.batch([1, 0]).rows["uid"].tolist() == [2, 1] and len(data) == 2
    (notice,) = data.notices
    assert notice.startswith("1 of 3 rows have no assistant turn and are left out") and "row 0)" in notice


def test_conversations_without_trained_tokens_or_end_tokens_are_reported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"row 0: no assistant turn in this or any other row"):
        conversations(tmp_path, CHAT[:1], CHAT[:1])
    (notice,) = conversations(tmp_path, [*CHAT, *CHAT], template=ENDED.replace("<eos>", "")).notices
    assert notice.startswith("1 assistant turns before the last are not ended by a special token")


# As Qwen3: the last turn has something that earlier turns lack.
DIVIDED = ENDED.replace("{{ m.content }}", "{% if loop.last and m.role == 'assistant' %}!{% endif %}{{ m.content }}")
ROW_1, ROW_2 = "<user>a<eos><assistant>!bc<eos>", "<user>a<eos><assistant>bc<eos><user>a<eos><assistant>!bc<eos>"


def rows_of(data: SFTDataset, *indices: int) -> list[str]:
    return [TOKENIZER.decode(ids) for ids in data.batch(indices).split_rows("input_ids")]


def test_conversation_is_a_unit_of_several_rows_where_the_template_changes_earlier_turns(tmp_path: Path) -> None:
    data = conversations(tmp_path, CHAT, CHAT[:1], [*CHAT, *CHAT], template=DIVIDED)
    assert len(data) == 2 and data.divided
    assert rows_of(data, 0) == [ROW_1] and rows_of(data, 1) == [ROW_1, ROW_2] and rows_of(data, 1, 0) == [ROW_1, ROW_2, ROW_1]
    batch = data.batch([1, 0])
    assert batch.rows["uid"].tolist() == [2, 2, 0] and len(batch) == 3
    masked = zip(batch.split_rows("input_ids"), batch.split_rows("response_mask"), strict=True)
    assert [TOKENIZER.decode(ids[mask.bool()]) for ids, mask in masked] == ["!bc<eos>"] * 3
    silent, several = data.notices
    assert silent.startswith("1 of 3 rows have no assistant turn")
    n = [len(TOKENIZER(row)["input_ids"]) for row in (ROW_1, ROW_2)]
    assert several.startswith("1 of 3 conversations are 2 rows of training, one for each place where the chat template renders")
    assert f"{sum(n)} tokens instead of about {n[1]} (the first: " in several and several.endswith("chats.parquet, row 2)")


def test_only_conversations_of_several_turns_without_marks_are_divided(tmp_path: Path, make: Any) -> None:
    marked = DIVIDED.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
    assert not make(("a", "b")).divided and not conversations(tmp_path, CHAT, [*CHAT, CHAT[0]], template=DIVIDED).divided
    assert conversations(tmp_path, CHAT, [*CHAT, *CHAT]).divided, "append-only is a property of the template, checked for these"
    data = conversations(tmp_path, [*CHAT, *CHAT], template=marked)
    assert not data.divided and rows_of(data, 0) == [ROW_2] and data.notices == ()


def test_each_row_of_a_divided_conversation_is_truncated(tmp_path: Path) -> None:
    first, second = (len(TOKENIZER(row)["input_ids"]) for row in (ROW_1, ROW_2))
    chats = ([*CHAT, *CHAT], CHAT)
    with pytest.raises(ValueError, match=rf"chats\.parquet, row 0: {second} tokens with EOS, data\.max_length is {first}"):
        conversations(tmp_path, *chats, template=DIVIDED, max_length=first)
    data = conversations(tmp_path, *chats, template=DIVIDED, max_length=first, truncation="left")
    assert rows_of(data, 0) == [ROW_1, "eos>" + ROW_2[-len(ROW_1) :]] or data.batch([0]).lengths.tolist() == [first, first]
    assert trained(data, 0)[1] == "!bc<eos>" * 2 and "1 of 3 rows are longer" in data.notices[0]
    cut = conversations(tmp_path, *chats, template=DIVIDED, max_length=first, truncation="right")
    assert trained(cut, 0)[1] == "!bc<eos>" and "1 of them keep no token to train on" in cut.notices[0]


def test_too_long_conversation_is_an_error_or_truncated(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"chats\.parquet, row 1: 44 tokens with EOS, data\.max_length is 30"):
        conversations(tmp_path, CHAT, [*CHAT, *CHAT], max_length=30)
    data = conversations(tmp_path, CHAT, [*CHAT, *CHAT], max_length=30, truncation="left")
    assert trained(data, 1)[1] == "bc<eos>bc<eos>" and data.batch([1]).total_tokens == 30
    assert "1 of 2 rows are longer" in data.notices[0]
