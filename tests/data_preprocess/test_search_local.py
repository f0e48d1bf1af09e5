import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from data_preprocess import search_local
from tests.data_preprocess.test_calculator import FILES
from tests.trainer.agents.tool_sessions import use
from tests.trainer.rewards.config import reward_config
from trainer.agents.verl_modules import load_tools
from trainer.rewards.rules.reward_registry import compute_score


def make(directory: Path, *flags: str) -> dict[str, list[dict[str, Any]]]:
    search_local.main(
        ["--local_save_dir", str(directory), "--train_size", "300", "--test_size", "50", "--sft_size", "1000", *flags]
    )
    return {split: pq.read_table(directory / f"{split}.parquet").to_pylist() for split in FILES}


def questions(rows: list[dict[str, Any]]) -> list[str]:
    return [(row.get("prompt") or row["messages"])[0]["content"] for row in rows]


def test_every_answer_is_found_by_the_tool_that_is_written(tmp_path: Path) -> None:
    files = make(tmp_path)
    (tool,) = load_tools(str(tmp_path / "tools.yaml"), "tools")
    towns = [question.removeprefix("Code of ").removesuffix("?") for question in questions(files["test"])]
    found, _ = use(tool, *({"query_list": [town]} for town in towns))
    for town, result, row in zip(towns, found, files["test"], strict=True):
        code = row["reward_model"]["ground_truth"]
        assert json.loads(result.text) == {"result": f"Doc 1 (Title: {town})\nThe code of {town} is {code}."}
        assert 100 <= int(code) <= 999
        response = f"<tool_response>1</tool_response>{code}"
        assert compute_score("search_local", response, code, {"finished": True}, reward_config()) == 1


def test_conversations_have_the_results_of_their_calls(tmp_path: Path) -> None:
    rows = make(tmp_path, "--called", "0.5")["sft"]
    (tool,) = load_tools(str(tmp_path / "tools.yaml"), "tools")
    kinds: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    calls = []
    for row in rows:
        question, *turns = row["messages"]
        town = question["content"].removeprefix("Code of ").removesuffix("?")
        kind = "guess"
        if len(turns) == 3:
            (call,) = turns[0]["tool_calls"]
            arguments = json.loads(call["function"]["arguments"])
            calls.append((arguments, turns[1]["content"]))
            is_read = json.loads(turns[1]["content"])["result"].endswith(f" is {turns[2]['content']}.")
            kind = "right" if is_read and arguments == {"query_list": [town]} else "wrong answer" if not is_read else "wrong call"
        kinds[town < search_local.TOWNS[5000]][kind] += 1
        assert json.loads(row["tools"]) == [tool.schema]
    found, _ = use(tool, *(arguments for arguments, _ in calls))
    assert [result.text for result in found] == [text for _, text in calls]
    for first, often in ((True, 0.9), (False, 0.12)):
        share = {kind: count / kinds[first].total() for kind, count in kinds[first].items()}
        assert share["right"] == pytest.approx(often, abs=0.04)
        assert share["wrong call"] > 0.02 < share["wrong answer"]
        assert share.get("guess", 0.0) == pytest.approx(0.9 - often, abs=0.04)


def test_a_town_is_asked_for_in_one_file_and_codes_depend_on_the_seed(tmp_path: Path) -> None:
    files, other = make(tmp_path / "1"), make(tmp_path / "2", "--seed", "1")
    asked = [question for rows in files.values() for question in questions(rows)]
    assert len(set(asked)) == len(asked) == 1350
    codes = [(tmp_path / name / "corpus.jsonl").read_text().splitlines() for name in ("1", "2")]
    assert len(codes[0]) == len(set(codes[0])) == 10000
    assert sum(a == b for a, b in zip(*codes, strict=True)) < 50, "by chance"
    assert files["test"] != other["test"]
