"""A reward of your own: how near the answer's length is to a target. docs/how_to/reward.md uses it."""

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any], target: int = 6
) -> dict[str, float]:
    """1 for an answer of ``target`` characters, less for each one too many or too few; with the length as a metric beside it."""
    length = len(solution_str)
    return {"score": max(0.0, 1.0 - abs(length - target) / target), "characters": length}
