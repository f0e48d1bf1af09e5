"""verl's scorers with verl's signatures, for reward functions and tools that call them."""

from typing import Any

from trainer.rewards.rules import gsm8k, math_dapo


def gsm8k_score(
    solution_str: str, ground_truth: str, method: Any = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """verl's GSM8K score: ``score`` for the right number, ``format_score`` for another one, 0 for none."""
    if gsm8k.extract(solution_str, method) is None:
        return 0.0
    return score if gsm8k.score(solution_str, ground_truth, method) else format_score


def math_dapo_score(solution_str: str, ground_truth: str, strict_box_verify: bool = False) -> dict[str, Any]:
    """Score of DAPO, see trainer.rewards.rules.math_dapo.score. As in verl, pred is None if it is strict and there is no box."""
    found = math_dapo.score(solution_str, ground_truth, strict_box_verify=strict_box_verify)
    return found | ({"pred": None} if strict_box_verify and found["pred"] == math_dapo.NO_ANSWER else {})
