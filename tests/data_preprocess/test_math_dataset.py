import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_preprocess import math_dataset
from data_preprocess.math_dataset import last_boxed

flat = st.text(alphabet="ab1+\\ $").map(lambda s: s.replace("\\", r"\{"))
braced = st.recursive(flat, lambda inner: inner.map(lambda s: f"x{{{s}}}y"))


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"So $x = \boxed{7}$.", "7"),
        (r"$\boxed{\frac{1}{2}}$ and $\boxed{\sqrt{\frac{3}{4}}}$", r"\sqrt{\frac{3}{4}}"),
        (r"$\boxed{\left\{ x \right\}}$", r"\left\{ x \right\}"),
        (r"$\boxed{\left\{ x \right.}$", r"\left\{ x \right."),
        (r"$\boxed {7}$", "7"),
        (r"$\boxed 7$", "7"),
        (r"$\fbox{7}$", "7"),
        (r"$\boxed{}$", ""),
    ],
)
def test_last_boxed(solution: str, answer: str) -> None:
    assert last_boxed(solution) == answer


@given(st.text(), braced, st.text().filter(lambda s: "boxed" not in s and "fbox" not in s))
def test_last_boxed_returns_any_boxed_content(before: str, answer: str, after: str) -> None:
    assert last_boxed(rf"{before} \boxed{{{answer}}}{after}") == answer


@pytest.mark.parametrize(("solution", "message"), [("x = 7", "no .boxed answer"), (r"\boxed{\frac{1}{2}", "not closed")])
def test_no_answer_is_an_error(solution: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        last_boxed(solution)


@pytest.mark.parametrize(("field", "value"), [("problem", None), ("solution", None), ("solution", ["a"])])
def test_a_field_that_is_no_text_is_named(field: str, value: Any) -> None:
    example = {"problem": "p", "level": "Level 1", "type": "Algebra", "solution": r"$\boxed{2}$", field: value}
    with pytest.raises(ValueError, match=rf"{field} is .*; it must be a text"):
        math_dataset.make_row(example, "train", 0)


def test_rows(tmp_path: Path) -> None:
    one = {"problem": "What is $1+1$?", "level": "Level 1", "type": "Algebra", "solution": r"It is $\boxed{2}$."}
    other = {"problem": "What is $2+2$?", "level": "Level 2", "subject": "Geometry", "solution": r"It is $\boxed{4}$."}
    for split, example in (("train", one), ("test", other)):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(example))
    math_dataset.main(["--local_dataset_path", str(tmp_path), "--local_save_dir", str(tmp_path / "out")])
    train, test = (pq.read_table(tmp_path / "out" / f"{split}.parquet").to_pylist()[0] for split in ("train", "test"))
    assert train == {
        "data_source": "DigitalLearningGmbH/MATH-lighteval",
        "prompt": [
            {
                "role": "user",
                "content": "What is $1+1$? Let's think step by step and output the final answer within \\boxed{}.",
            }
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {
            "split": "train",
            "index": 0,
            "answer": one["solution"],
            "question": one["problem"],
            "level": "Level 1",
            "subject": "Algebra",
        },
    }
    assert test["extra_info"]["subject"] == "Geometry" and test["reward_model"]["ground_truth"] == "4"
