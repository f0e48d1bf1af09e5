"""Custom reward: how close the response's length is to a target. Used by docs/how_to/reward.md."""

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any], target: int = 6
) -> dict[str, float]:
    """1 for a response of ``target`` characters, less for each missing or extra one; the length is reported as a metric."""
    length = len(solution_str)
    return {"score": max(0.0, 1.0 - abs(length - target) / target), "characters": length}
