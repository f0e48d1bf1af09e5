import time

import pytest

from trainer.rewards.rules.math_dapo import normalise, score


@pytest.mark.parametrize(
    ("answer", "truth", "right", "pred"),
    [
        ("Answer: 34", "34", True, "34"),
        ("so\nANSWER : $34$", "34", True, "34"),
        ("Answer: 3\nAnswer: 34", "34", True, "34"),
        ("Answer:\n34", "34", True, "34"),
        ("Answer: x = 34", "34", True, "34"),
        ("Answer: 34.", "34", False, "34."),
        ("Answer: 1,000", "1000", True, "1000"),
        (r"Answer: \boxed{34}", "34", True, "34"),
        (r"Answer: \frac12", r"\frac{1}{2}", True, r"\frac{1}{2}"),
        (r"Answer: \text{a cat}", "cat", True, "cat"),
        ("Answer: 34 degrees", "34", True, "34"),
        (r"\boxed{34}", "34", True, "34"),
        (r"\boxed{34.0}", "34", False, "34.0"),  # a box is compared to the letter
        (r"Answer: 5 \boxed{34}", "34", False, "534"),
        (r"Answer: 5" + "\n" + r"\boxed{34}", "34", False, "5"),
        ("34", "34", False, "[INVALID]"),
        ("Answer: 34" + " " * 300, "34", False, "[INVALID]"),
        (r"\boxed{34}" + " " * 100, "34", False, "[INVALID]"),
        (r"\boxed{34", "34", False, "[INVALID]"),
    ],
)
def test_last_answer_line_or_last_box_counts(answer: str, truth: str, right: bool, pred: str) -> None:
    assert score(answer, truth, strict_box_verify=False) == {"score": 1.0 if right else -1.0, "acc": right, "pred": pred}


@pytest.mark.parametrize(
    ("answer", "right"),
    [(r"\boxed{34}", True), ("Answer: 34", False), (r"Answer: 5 \boxed{34} so", True), (r"\boxed{ 34}", False)],
)
def test_strict_box_verify_requires_a_box(answer: str, right: bool) -> None:
    assert score(answer, "34", strict_box_verify=True)["acc"] is right


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("an apple", "apple"),
        (r"\sqrt2", r"\sqrt{2}"),
        (r"3 \text{m}", "3"),
        (r"90^\circ", "90"),
        (r"3\;km", "3"),
        ("1{,}000", "1000"),
        (r"the answer is $7$ indeed", "7"),
        (r"\overline{AB}", "AB"),
        (r"2,3", "23"),  # digits and commas are one number: Minerva's rule
    ],
)
def test_normalization_follows_minerva(text: str, normal: str) -> None:
    assert normalise(text) == normal


@pytest.mark.parametrize("part", ["$", "Answer:", "\\boxed{", "\\text{", "{", "}", "frac", "9" * 1000, "\0", "=", "sqrt"])
def test_adversarial_responses_are_scored_quickly(part: str) -> None:
    start = time.monotonic()
    for strict in (False, True):
        assert score("Answer:" + part * 100_000, "1", strict_box_verify=strict)["score"] == -1.0
    assert time.monotonic() - start < 1.0
