"""The task, from a data set: edit make_row and score. ``python task.py`` writes data/train.parquet and data/test.parquet."""

import re
from pathlib import Path
from typing import Any

from data_preprocess.source import preprocess
from data_preprocess.writer import rl_row

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def make_row(example: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    """A row for training from an example of the data set: {"question": ..., "answer": "... #### 42"}."""
    return rl_row(
        data_source=Path(__file__).resolve().parent.name,
        prompt=f"{example['question']} {INSTRUCTION}",
        ability="math",
        ground_truth=example["answer"].rpartition("####")[2].strip().replace(",", ""),
        split=split,
        index=index,
    )


def score(response: str, answer: str) -> float:
    """1 if the number after the last #### is the answer."""
    numbers = re.findall(r"#### *(-?[0-9.,]+)", response)
    return float(bool(numbers) and numbers[-1].replace(",", "").rstrip(".") == answer)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, float]:
    """What training calls. acc: the held-out accuracy counts complete successes only."""
    value = score(solution_str, ground_truth)
    return {"score": value, "acc": float(value >= 1.0)}


if __name__ == "__main__":
    preprocess(None, make_row, hub="openai/gsm8k", config="main", save_dir="data", about="Write train.parquet and test.parquet")
