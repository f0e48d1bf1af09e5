"""Scorers with verl's signatures."""

import pytest

from trainer.rewards.rules.verl_scores import gsm8k_score, math_dapo_score


@pytest.mark.parametrize(("text", "expected"), [("#### 7", 2.0), ("#### 8", 0.1), ("7", 0.0)])
def test_gsm8k_has_a_score_for_the_format(text: str, expected: float) -> None:
    assert gsm8k_score(text, "7", method="strict", format_score=0.1, score=2.0) == expected


def test_dapo_returns_verls_fields() -> None:
    assert math_dapo_score("so \\boxed{4}", "4", strict_box_verify=True) == {"score": 1.0, "acc": True, "pred": "4"}
    assert math_dapo_score("Answer: 4", "4", strict_box_verify=True) == {"score": -1.0, "acc": False, "pred": None}
    assert math_dapo_score("Answer: 4", "4") == {"score": 1.0, "acc": True, "pred": "4"}
