import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from data_preprocess import calculator
from tests.data_preprocess.test_tiny_model_tools import TOKENIZER
from tests.trainer.data.tokenizers import data_config
from tests.trainer.rewards.config import reward_config
from trainer.agents.formats import call_format, parse_turn
from trainer.agents.native.calculator import calculator as tool
from trainer.data.dataset import PromptDataset
from trainer.data.sft_dataset import SFTDataset
from trainer.rewards.rules.reward_registry import compute_score

FILES = ("train", "test", "sft")


def make(directory: Path, *flags: str) -> dict[str, list[dict[str, Any]]]:
    calculator.main(
        ["--local_save_dir", str(directory), "--train_size", "300", "--test_size", "50", "--sft_size", "2000", *flags]
    )
    return {split: pq.read_table(directory / f"{split}.parquet").to_pylist() for split in FILES}


def kind(row: dict[str, Any]) -> str:
    """What a conversation of the warm start shows, by its texts."""
    question, *turns = row["messages"]
    truth = str(eval(question["content"]))
    if len(turns) == 1:
        assert turns[0]["content"].isdigit() and turns[0]["tool_calls"] is None
        return "guess"
    called, result, answer = turns
    (call,) = called["tool_calls"]
    assert call["function"]["name"] == tool.name and result["tool_call_id"] == call["id"]
    expression = json.loads(call["function"]["arguments"])["expression"]
    assert result["content"] == tool(expression)
    if expression != question["content"]:
        assert len(expression) == 7 and answer["content"] == result["content"] != truth
        return "wrong call"
    return "right" if answer["content"] == truth else "wrong answer"


def test_conversations_call_often_for_low_numbers_and_seldom_for_others(tmp_path: Path) -> None:
    counts: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    rows = make(tmp_path, "--called", "0.5")["sft"]
    for row in rows:
        counts[int(row["messages"][0]["content"][:3]) < 550][kind(row)] += 1
        assert json.loads(row["tools"]) == [tool.schema]
    assert 900 < counts[True].total() < 1100
    for low, often in ((True, 0.9), (False, 0.12)):
        share = {name: count / counts[low].total() for name, count in counts[low].items()}
        assert share["right"] == pytest.approx(often, abs=0.03)
        assert share["wrong call"] + share["wrong answer"] == pytest.approx(0.1, abs=0.03)
        assert min(share["wrong call"], share["wrong answer"]) > 0.03
    assert counts[True]["guess"] == 0, "0.9 + 0.1 of the low numbers are called"


def test_rows_are_problems_and_their_sums(tmp_path: Path) -> None:
    files = make(tmp_path)
    for split in ("train", "test"):
        for i, row in enumerate(files[split]):
            a, b = row["prompt"][0]["content"].split("+")
            assert 100 <= int(a) <= 999 and 100 <= int(b) <= 999
            truth = row["reward_model"]["ground_truth"]
            assert truth == str(int(a) + int(b)) and row["extra_info"] == {"split": split, "index": i}


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("579", 1.0),
        ("<tool_call>{}</tool_call><tool_response>579</tool_response>579", 1.0),
        ("<tool_call>{}</tool_call><tool_response>579</tool_response>578", 0.0),
        ("<tool_call>{}</tool_call><tool_response>579</tool_response>", 0.0),
        ("579<tool_call>{}</tool_call><tool_response>579</tool_response>57", 0.0),
        ("<tool_response>1</tool_response><tool_response>579</tool_response>579", 1.0),
    ],
)
def test_the_answer_after_the_last_result_is_scored(response: str, score: float) -> None:
    assert compute_score("calculator", response, "579", {"finished": True}, reward_config()) == score
    assert compute_score("calculator", response, "579", {"finished": False}, reward_config()) == 0.0


def test_no_problem_is_in_two_files_or_twice(tmp_path: Path) -> None:
    files = make(tmp_path)
    questions = [(row.get("prompt") or row["messages"])[0]["content"] for rows in files.values() for row in rows]
    assert len(set(questions)) == len(questions) == 2350


def test_rows_depend_on_the_seed_only(tmp_path: Path) -> None:
    first, again, other = (make(tmp_path / name, "--seed", seed) for name, seed in (("1", "1"), ("2", "1"), ("3", "2")))
    assert first == again and all(first[split] != other[split] for split in FILES)
    more = make(tmp_path / "more", "--seed", "1", "--train_size", "400")
    assert more["test"] == first["test"] and more["train"][:300] == first["train"]


def test_too_many_problems_raise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make(tmp_path, "--train_size", "900000")
    assert "50 + 900000 + 2000 = 902050 problems are requested, but there are only 810000" in capsys.readouterr().err


def test_the_tiny_tokenizer_reads_it(tmp_path: Path) -> None:
    make(tmp_path, "--sft_size", "100")
    data = SFTDataset(
        [str(tmp_path / "sft.parquet")], TOKENIZER, messages_key="messages", tools_key="tools", prompt_key="", response_key="",
        max_length=37, truncation="error", apply_chat_template_kwargs={},
    )  # fmt: skip
    assert len(data) == 100 and data.notices == ()
    batch = data.batch(range(100))
    assert len(batch.lengths) == 100, "a conversation is one row"
    lengths = set(batch.lengths.tolist())
    assert lengths <= {17, 18, 35, 37}, "prompt 13; guess 3 or 4; call 11, result 5 or 6, answer 3 or 4; the ends of turns"
    for ids, messages in zip(batch.split_rows("input_ids"), make(tmp_path, "--sft_size", "100")["sft"], strict=True):
        first = str(TOKENIZER.decode(ids)).split("<|assistant|>")[1].split("<eos>")[0]
        calls = messages["messages"][1]["tool_calls"] or []
        written = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
        assert [(call.name, call.arguments) for call in parse_turn(call_format("hermes"), first).calls] == written
    prompts = PromptDataset(
        [str(tmp_path / "train.parquet")], TOKENIZER, data_config(max_prompt_length=10), max_samples=-1, seed=0
    )
    assert all(len(prompts[i].prompt_ids) == 10 for i in range(300))
