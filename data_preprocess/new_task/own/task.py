"""The task: edit make_problem and score. ``python task.py`` writes data/train.parquet and data/test.parquet."""

from pathlib import Path
from random import Random
from typing import Any

from data_preprocess.own_task import write_task


def make_problem(random: Random) -> tuple[str, str]:
    """A prompt, and the answer to it. All random choices come from ``random``."""
    word = "".join(random.choices("abcdefgh", k=6))
    return f"{word} backwards: ", word[::-1]


def score(response: str, answer: str) -> float:
    """1 for a right response. Less, but more than 0, for one that is nearly right: a model learns faster from small steps."""
    response = response.strip()
    right = 0
    while right < min(len(response), len(answer)) and response[right] == answer[right]:
        right += 1
    return right / max(len(response), len(answer), 1)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, float]:
    """What training calls. acc: the held-out accuracy counts complete successes only."""
    value = score(solution_str, ground_truth)
    return {"score": value, "acc": float(value >= 1.0)}


if __name__ == "__main__":
    write_task(make_problem, name=Path(__file__).resolve().parent.name)
