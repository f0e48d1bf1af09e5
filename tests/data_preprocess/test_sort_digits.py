from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from data_preprocess import sort_digits
from data_preprocess.tiny_model import character_tokenizer
from tests.trainer.data.tokenizers import data_config
from tests.trainer.rewards.config import reward_config
from trainer.data.dataset import PromptDataset
from trainer.rewards.rules.reward_registry import compute_score

SIZES = ["--train_size", "300", "--test_size", "50", "--sft_size", "100"]
PAIRS = ["--preferences_size", "60", "--preferences_test_size", "20"]
FILES = ("train", "test", "sft", "preferences", "preferences_test")


def make(directory: Path, *flags: str) -> dict[str, list[dict[str, Any]]]:
    sort_digits.main(["--local_save_dir", str(directory), *SIZES, *PAIRS, *flags])
    return {split: pq.read_table(directory / f"{split}.parquet").to_pylist() for split in FILES}


def test_rows_are_problems_and_their_answers(tmp_path: Path) -> None:
    files = make(tmp_path)
    assert [len(files[split]) for split in FILES] == [300, 50, 100, 60, 20]
    for split in ("train", "test"):
        for i, row in enumerate(files[split]):
            question = row["prompt"][0]["content"]
            assert len(question) == 7 and question[:6].isdigit() and question[6] == "="
            truth = row["reward_model"]["ground_truth"]
            assert truth == "".join(sorted(question[:6]))
            assert row["data_source"] == "sort_digits" and row["extra_info"] == {"split": split, "index": i}
            assert compute_score(row["data_source"], truth, truth, {"finished": True}, reward_config()) == 1.0
    for row in files["sft"]:
        assert row["response"] == "".join(sorted(row["prompt"][0]["content"][:6]))


def test_the_rejected_answer_is_the_chosen_one_with_a_mistake(tmp_path: Path) -> None:
    rows = [row for split in FILES[3:] for row in make(tmp_path)[split]]
    lengths = set()
    for row in rows:
        assert row["chosen"] == "".join(sorted(row["prompt"][0]["content"][:6])) != row["rejected"]
        assert row["rejected"].isdigit()
        lengths.add(len(row["rejected"]))
    assert lengths == {5, 6, 7} and any(sorted(row["chosen"]) == sorted(row["rejected"]) for row in rows)


def test_no_problem_is_in_two_files_or_twice(tmp_path: Path) -> None:
    questions = [row["prompt"][0]["content"] for rows in make(tmp_path).values() for row in rows]
    assert len(set(questions)) == len(questions) == 530


def test_problems_depend_on_the_seed_only(tmp_path: Path) -> None:
    first, again, other = (make(tmp_path / name, "--seed", seed) for name, seed in (("1", "1"), ("2", "1"), ("3", "2")))
    assert first == again != other
    more = make(tmp_path / "more", "--seed", "1", "--train_size", "400", "--sft_size", "200")
    assert more["test"] == first["test"] and more["train"][:300] == first["train"]


def test_too_many_problems_raise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make(tmp_path, "--digits", "2")
    assert "50 + 300 + 100 + 20 + 60 = 530 problems are requested, but 2 digits give only 100" in capsys.readouterr().err
    assert len({row["prompt"][0]["content"] for rows in make(tmp_path, "--digits", "3").values() for row in rows}) == 530


def test_the_tiny_tokenizer_reads_it(tmp_path: Path) -> None:
    make(tmp_path)
    tokenizer = character_tokenizer("0123456789=")
    data = PromptDataset([str(tmp_path / "train.parquet")], tokenizer, data_config(max_prompt_length=7), max_samples=-1, seed=0)
    assert len(data) == 300
    assert all(tokenizer.decode(data[i].prompt_ids) == data[i].text and len(data[i].prompt_ids) == 7 for i in range(300))
