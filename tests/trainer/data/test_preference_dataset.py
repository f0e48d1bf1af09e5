"""Preference pairs as rows of tokens."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from data_preprocess.writer import preference_row, write
from tests.trainer.data.tokenizers import byte_tokenizer
from trainer.data.preference_dataset import PreferenceDataset

SETTINGS: dict[str, Any] = {
    "prompt_key": "prompt",
    "chosen_key": "chosen",
    "rejected_key": "rejected",
    "margin_key": None,
    "max_length": 64,
    "truncation": "error",
    "apply_chat_template_kwargs": {},
}
ENDED = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def dataset(folder: Path, *rows: dict[str, Any], template: str | None = None, **changes: Any) -> PreferenceDataset:
    path = write(rows, str(folder), "pairs")
    tokenizer = byte_tokenizer() if template is None else byte_tokenizer(chat_template=template)
    return PreferenceDataset([str(path)], tokenizer, **(SETTINGS | changes))


def texts(data: PreferenceDataset, *indices: int) -> list[str]:
    return [byte_tokenizer().decode(row) for row in data.batch(indices).split_rows("input_ids")]


def responses(data: PreferenceDataset, *indices: int) -> list[str]:
    """Text of each row's response_mask, which ends with the row."""
    batch = data.batch(indices)
    found = []
    for ids, mask in zip(batch.split_rows("input_ids"), batch.split_rows("response_mask"), strict=True):
        assert mask.diff().min() >= 0, "one stretch, up to the end"
        found.append(byte_tokenizer().decode(ids[mask.bool()]))
    return found


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_pair_is_two_adjacent_rows(tmp_path: Path) -> None:
    data = dataset(tmp_path, preference_row("1", "a", "bb"), preference_row("22", "cc", ""))
    assert len(data) == 2 and texts(data, 1, 0) == [
        "<user>22<a>cc<eos>",
        "<user>22<a><eos>",
        "<user>1<a>a<eos>",
        "<user>1<a>bb<eos>",
    ]
    batch = data.batch([1, 0])
    assert batch.rows["uid"].tolist() == [1, 1, 0, 0] and batch.rows["side"].tolist() == [1, -1, 1, -1]
    assert batch.rows["margin"].tolist() == [0.0] * 4
    assert responses(data, 1, 0) == ["cc<eos>", "<eos>", "a<eos>", "bb<eos>"]
    assert data.prompt_lengths([1, 0]).tolist() == [11, 11, 10, 10]


def test_margins_are_read(tmp_path: Path) -> None:
    rows = [preference_row("1", "a", "b") | {"by": by} for by in (2.5, 1)]
    assert dataset(tmp_path, *rows, margin_key="by").batch([1, 0]).rows["margin"].tolist() == [1.0, 1.0, 2.5, 2.5]
    with pytest.raises(ValueError, match=r"pairs\.parquet, row 1: by is None; must be a finite number"):
        dataset(tmp_path, rows[0], rows[1] | {"by": None}, margin_key="by")
    for margin in (10**400, 1e39, math.nan):
        file = tmp_path / "large.jsonl"
        file.write_text(json.dumps(rows[0] | {"by": margin}))
        with pytest.raises(ValueError, match=r"large\.jsonl, row 0: by is \S{3,60}; must be a finite number within float32"):
            PreferenceDataset([str(file)], byte_tokenizer(), **(SETTINGS | {"margin_key": "by"}))


def test_answers_that_are_conversations(tmp_path: Path) -> None:
    """Responses continue the prompt's conversation; the row ends with the response's last turn."""
    chosen, rejected = [turn("assistant", "a"), turn("user", "b"), turn("assistant", "c")], [turn("assistant", "d")]
    data = dataset(tmp_path, {"prompt": [turn("user", "p")], "chosen": chosen, "rejected": rejected}, template=ENDED)
    whole = ["<user>p<eos>\n<assistant>a<eos>\n<user>b<eos>\n<assistant>c<eos>", "<user>p<eos>\n<assistant>d<eos>"]
    assert texts(data, 0) == whole and responses(data, 0) == ["c<eos>", "d<eos>"]
    assert data.prompt_lengths([0]).tolist() == [len("<user>p") + 1 + len("\n<assistant>")] * 2, "up to where they differ"
    alone = {"chosen": [turn("user", "p"), *chosen], "rejected": [turn("user", "p"), *rejected]}
    assert texts(dataset(tmp_path, alone, template=ENDED, prompt_key=None), 0) == whole


def test_earlier_turns_may_be_rendered_differently(tmp_path: Path) -> None:
    """As Qwen3's, without the thinking block of the last turn; as Qwen3.5's, whose prompt opens it."""
    for opened in ("", "<t>"):
        template = ENDED.replace("{{ m.content }}", "{% if loop.last and m.role == 'assistant' %}<t>{% endif %}{{ m.content }}")
        template = template.replace("<assistant>{% endif", f"<assistant>{opened}{{% endif")
        chosen, rejected = [turn("assistant", "a"), turn("user", "b"), turn("assistant", "c")], [turn("assistant", "d")]
        data = dataset(tmp_path, {"prompt": [turn("user", "p")], "chosen": chosen, "rejected": rejected}, template=template)
        whole = ["<user>p<eos>\n<assistant>a<eos>\n<user>b<eos>\n<assistant><t>c<eos>", "<user>p<eos>\n<assistant><t>d<eos>"]
        assert texts(data, 0) == whole and len(data.batch([0])) == 2 and data.notices == []


def test_only_the_last_turn_has_to_continue_its_prompt(tmp_path: Path) -> None:
    template = ENDED.replace("<assistant>{% endif", "<assistant>{% if messages | length == 1 %}!{% endif %}{% endif")
    chosen = [turn("assistant", "a"), turn("user", "b"), turn("assistant", "c")]
    row = {"prompt": [turn("user", "p")], "chosen": chosen, "rejected": [*chosen[:2], turn("assistant", "d")]}
    context = "<user>p<eos>\n<assistant>a<eos>\n<user>b<eos>\n<assistant>"
    assert texts(dataset(tmp_path, row, template=template), 0) == [f"{context}c<eos>", f"{context}d<eos>"]


def test_response_is_the_last_turn_of_templates_with_marks(tmp_path: Path) -> None:
    turns = ("{% generation %}{{ m.content }}<eos>{% endgeneration %}", "{{ m.content }}<eos>")
    template = ENDED.replace(turns[1], f"{{% if m.role == 'assistant' %}}{turns[0]}{{% else %}}{turns[1]}{{% endif %}}")
    chosen, rejected = [turn("assistant", "a"), turn("user", "b"), turn("assistant", "c")], [turn("assistant", "d")]
    data = dataset(tmp_path, {"prompt": [turn("user", "p")], "chosen": chosen, "rejected": rejected}, template=template)
    assert responses(data, 0) == ["c<eos>", "d<eos>"] and texts(data, 0)[0].endswith("a<eos>\n<user>b<eos>\n<assistant>c<eos>")


def test_response_is_all_of_a_turn_that_the_template_marks_in_parts(tmp_path: Path) -> None:
    """Two spans, and the end token outside of them."""
    apart = "{% generation %}{{ m.content[0] }}{% endgeneration %}~{% generation %}{{ m.content[1:] }}{% endgeneration %}<eos>"
    plain = "{{ m.content }}<eos>"
    template = ENDED.replace(plain, f"{{% if m.role == 'assistant' %}}{apart}{{% else %}}{plain}{{% endif %}}")
    chosen, rejected = [turn("assistant", "ab"), turn("user", "b"), turn("assistant", "cd")], [turn("assistant", "ef")]
    data = dataset(tmp_path, {"prompt": [turn("user", "p")], "chosen": chosen, "rejected": rejected}, template=template)
    assert responses(data, 0) == ["c~d<eos>", "e~f<eos>"]


def test_whole_texts(tmp_path: Path) -> None:
    data = dataset(tmp_path, {"chosen": "q: a", "rejected": "q: b"}, prompt_key=None)
    assert texts(data, 0) == ["q: a<eos>", "q: b<eos>"]
    assert responses(data, 0) == ["a<eos>", "b<eos>"], "the prompt is what both have in common"
    bare = dataset(tmp_path, {"prompt": "", "chosen": "ab", "rejected": "c"})
    assert responses(bare, 0) == ["b<eos>", "<eos>"], "nothing predicts the first token"
    equal = dataset(tmp_path, {"chosen": "q", "rejected": "q"}, {"chosen": "x", "rejected": "y"}, prompt_key=None)
    assert responses(equal, 0, 1) == ["<eos>", "<eos>", "<eos>", "<eos>"]


def test_invalid_pairs_raise(tmp_path: Path) -> None:
    answers = {"chosen": [turn("assistant", "a")], "rejected": [turn("assistant", "b")]}
    with pytest.raises(ValueError, match=r"row 0: chosen is a conversation, so the prompt must be one too, or null"):
        dataset(tmp_path, {"prompt": "text"} | answers, template=ENDED)
    with pytest.raises(ValueError, match=r"row 0: rejected does not end with an assistant turn"):
        unanswered = answers | {"rejected": [turn("assistant", "b"), turn("user", "?")]}
        dataset(tmp_path, {"prompt": [turn("user", "p")]} | unanswered, template=ENDED)
    with pytest.raises(ValueError, match=r"row 1: the response is a NoneType; must be text"):
        dataset(tmp_path, preference_row("1", "a", "b"), preference_row("1", "a", "b") | {"rejected": None})
    with pytest.raises(ValueError, match=r"row 0: the response is a NoneType; must be text"):
        dataset(tmp_path, preference_row("1", "a", "b") | {"chosen": None}, preference_row("1", "a", "b"))
    with pytest.raises(ValueError, match=r"row 1: the prompt is 5, neither a text nor a list of messages"):
        rows = [preference_row("1", "a", "b"), preference_row("1", "a", "b") | {"prompt": 5}]
        (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        PreferenceDataset([str(tmp_path / "rows.jsonl")], byte_tokenizer(), **SETTINGS)
    with pytest.raises(ValueError, match=r"no column 'better'; it has prompt, chosen, rejected"):
        dataset(tmp_path, preference_row("1", "a", "b"), chosen_key="better")


def test_token_outside_the_vocabulary_raises_with_its_row(tmp_path: Path) -> None:
    data = dataset(tmp_path, preference_row("1", "a", "b"), preference_row("1", "a", "~"), preference_row("1", "c", "a"))
    largest = int(data.batch([1]).tokens["input_ids"].max())
    data.check_tokens(largest + 1, "model")
    with pytest.raises(
        ValueError, match=rf"row 1: it contains token {largest}, .* has {largest}; set model\.tokenizer_path to the"
    ):
        data.check_tokens(largest, "model")


def test_identical_responses_are_reported(tmp_path: Path) -> None:
    data = dataset(tmp_path, preference_row("1", "a", "a"), preference_row("1", "a", "b"))
    assert data.notices == ["1 of 2 pairs have identical chosen and rejected responses, which give no gradient"]


def test_too_long_response_is_an_error_or_truncated(tmp_path: Path) -> None:
    pair = preference_row("1", "aaa", "b")  # 6 + 1 + 3 + 3 + 1 = 14 tokens, and 12
    assert dataset(tmp_path, pair, max_length=14).notices == []
    with pytest.raises(ValueError, match=r"row 0: 14 tokens with the chosen response, data\.max_length is 13"):
        dataset(tmp_path, pair, max_length=13)
    data = dataset(tmp_path, pair, max_length=13, truncation="left")
    assert texts(data, 0) == ["user>1<a>aaa<eos>", "<user>1<a>b<eos>"] and responses(data, 0) == ["aaa<eos>", "b<eos>"]
    assert data.prompt_lengths([0]).tolist() == [0, 0]
    assert data.notices == ["1 of 2 responses are longer than data.max_length=13 tokens and are truncated (data.truncation=left)"]
    data = dataset(tmp_path, pair, max_length=3, truncation="left")
    assert responses(data, 0) == ["a<eos>", "b<eos>"], "nothing predicts the first token"
    data = dataset(tmp_path, pair, max_length=10, truncation="right")
    assert responses(data, 0) == ["", ""] and data.notices[0].endswith("; 2 of them keep no token of the response")
