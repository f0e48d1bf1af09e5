"""The task, learned from preferences: edit make_problem, worse and score. ``python task.py`` writes the files of data/."""

from pathlib import Path
from random import Random
from typing import Any

from data_preprocess.own_task import write_task


def make_problem(random: Random) -> tuple[str, str]:
    """A prompt, and the better response to it. All random choices come from ``random``."""
    numbers = random.sample(range(10, 100), 3)
    return f"largest of {' '.join(map(str, numbers))}: ", str(max(numbers))


def worse(random: Random, prompt: str, better: str) -> str:
    """A response that people like less than ``better``."""
    return random.choice([word for word in prompt.split() if word.strip(":").isdigit() and word.strip(":") != better]).strip(":")


def score(response: str, better: str) -> float:
    """What the judge should think of a response. Measured only; a task of people's preferences has no such function: return 0."""
    return float(response.strip() == better)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, float]:
    """What training calls. acc: the held-out accuracy counts complete successes only."""
    value = score(solution_str, ground_truth)
    return {"score": value, "acc": float(value >= 1.0)}


if __name__ == "__main__":
    write_task(make_problem, name=Path(__file__).resolve().parent.name, worse=worse)
