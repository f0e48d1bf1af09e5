from pathlib import Path
from random import Random
from typing import Any

import pyarrow.parquet as pq
import pytest

from data_preprocess.own_task import write_task

SIZES = ["--train_size=40", "--test_size=10"]


def count(random: Random) -> tuple[str, str]:
    number = random.randrange(50)
    return f"{number}+1=", str(number + 1)


def make(directory: Path, *flags: str, **more: Any) -> dict[str, list[dict[str, Any]]]:
    write_task(count, name="count", argv=[f"--local_save_dir={directory}", *SIZES, *flags], **more)
    return {split: pq.read_table(directory / f"{split}.parquet").to_pylist() for split in ("train", "test")}


def test_no_problem_is_held_out_and_trained_on(tmp_path: Path) -> None:
    files = make(tmp_path)
    assert {split: len(rows) for split, rows in files.items()} == {"train": 40, "test": 10}
    prompts = [row["prompt"][0]["content"] for rows in files.values() for row in rows]
    assert len({*prompts}) == 50
    for row in files["train"]:
        assert row["response"] == row["reward_model"]["ground_truth"] and row["data_source"] == "count"


def test_a_prompt_with_several_answers_is_one_problem(tmp_path: Path) -> None:
    def ambiguous(random: Random) -> tuple[str, str]:
        return count(random)[0], str(random.randrange(3))

    write_task(ambiguous, name="count", argv=[f"--local_save_dir={tmp_path}", *SIZES])
    rows = [row for split in ("train", "test") for row in pq.read_table(tmp_path / f"{split}.parquet").to_pylist()]
    assert len(rows) == len({row["prompt"][0]["content"] for row in rows}) == 50


def test_conversations_may_begin_alike(tmp_path: Path) -> None:
    def hidden(random: Random) -> tuple[str, str]:
        return "guess", count(random)[1]

    def example(random: Random, prompt: str, answer: str) -> list[dict[str, Any]]:
        return [{"role": "assistant", "content": answer}]

    write_task(hidden, name="guess", argv=[f"--local_save_dir={tmp_path}", *SIZES], example=example)
    rows = [row for split in ("train", "test") for row in pq.read_table(tmp_path / f"{split}.parquet").to_pylist()]
    assert len(rows) == len({row["reward_model"]["ground_truth"] for row in rows}) == 50


def test_a_small_task_has_fewer_rows(tmp_path: Path) -> None:
    assert len(make(tmp_path, "--train_size=100")["train"]) == 40


def test_too_few_problems_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make(tmp_path, "--test_size=30")
    assert "make_problem gives 50 different problems, and 30 are held out" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == []


def test_the_files_depend_on_the_seed_only(tmp_path: Path) -> None:
    first, again, other = (make(tmp_path / name, f"--seed={seed}") for name, seed in (("1", 1), ("2", 1), ("3", 2)))
    assert first == again != other


def test_columns_of_conversations_and_pairs(tmp_path: Path) -> None:
    def example(random: Random, prompt: str, answer: str) -> list[dict[str, Any]]:
        return [{"role": "assistant", "content": answer}]

    rows = make(tmp_path / "tools", example=example, tools=[{"type": "function"}])["train"]
    assert [message["role"] for message in rows[0]["messages"]] == ["user", "assistant"]
    assert rows[0]["tools"] == '[{"type": "function"}]' and "response" not in rows[0]
    row = make(tmp_path / "pairs", worse=lambda random, prompt, answer: "?")["test"][0]
    assert (row["chosen"], row["rejected"]) == (row["response"], "?")
