"""The data set's own solutions score 1 by all three methods: docs/evidence.md has the count; some in its form are here."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.rewards.rules.gsm8k import extract, score

STRICT = [
    ("so 3 + 4 = 7\n#### 7", "7"),
    ("#### 1,234.50", "1234.50"),
    ("#### 18.", "18."),  # exact text, as in verl
    ("#### -5", "-5"),
    ("#### .5", ".5"),
    ("#### 3\n#### 4", "4"),
    ("#### 4 then 9", "4"),
    ("####7", None),
    ("####  7", None),
    ("#### $7", None),
    ("#### **7**", None),
    ("the answer is 7", None),
    ("#### seven 7", None),
    ("#### 7" + " " * 299, None),  # the mark lies before the last 300 characters
    ("", None),
]


@pytest.mark.parametrize(("text", "number"), STRICT)
def test_strict_takes_the_last_marked_number(text: str, number: str | None) -> None:
    assert extract(text, "strict") == number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7 apples, then 12.", "12"),
        ("it costs $1,200,", "1200"),
        ("#### 3 or rather 4", "4"),
        ("7 . . .", "7"),
        ("7, -", "7"),
        ("10-5", "-5"),
        ("none", None),
        ("...", None),
        ("7" + " " * 300, None),
    ],
)
def test_flexible_takes_the_last_number(text: str, number: str | None) -> None:
    assert extract(text, "flexible") == number


@pytest.mark.parametrize(
    ("answer", "truth", "strict", "flexible", "math"),
    [
        ("#### 18", "18", 1.0, 1.0, 1.0),
        ("#### 18.00", "18", 0.0, 0.0, 1.0),
        ("#### 1,800", "1800", 1.0, 1.0, 1.0),
        ("#### 1800", "1,800", 1.0, 1.0, 1.0),
        ("18", "18", 0.0, 1.0, 1.0),
        ("#### 18, or 19", "18", 1.0, 0.0, 1.0),
        ("#### $18", "18", 0.0, 1.0, 1.0),
        ("#### 180", "18", 0.0, 0.0, 0.0),
        ("#### -18", "18", 0.0, 0.0, 0.0),
        ("#### 1/2", "0.5", 0.0, 0.0, 1.0),
        ("", "18", 0.0, 0.0, 0.0),
    ],
)
def test_score(answer: str, truth: str, strict: float, flexible: float, math: float) -> None:
    assert (score(answer, truth), score(answer, truth, "flexible"), score(answer, truth, "math")) == (strict, flexible, math)


@pytest.mark.parametrize(
    "answer",
    [
        "#### 1,234.50",
        "#### $1,234.50.",
        r"#### \$1{,}234.5",
        "####1234.5",
        "#### x = 1234.5 dollars",
        "#### **1234.5**",
        "so \\boxed{1234.5}",
        r"#### 9 \boxed{1234\frac{1}{2}}",
        "\\boxed{9} #### 1234 1/2",
        "#### 2469/2",
        r"#### $\dfrac{2469}{2}$",
        "#### 123450%",
        "#### 1234.5%",
        "#### 12.345 \\times 10^{2}",
        "#### 1.2345e3",
        "It is 1,234.5.",
        "#### 1234.5\nNot 7",
    ],
)
def test_math_compares_values_at_the_position_of_the_answer(answer: str) -> None:
    assert score(answer, "1234.5", "math") == 1.0
    assert score(answer, "1234.25", "math") == 0.0
    assert score(answer, "-1234.5", "math") == 0.0


@given(st.integers(), st.text())
def test_any_number_is_found_after_any_text(number: int, text: str) -> None:
    for method in ("strict", "flexible", "math"):
        assert score(f"{text}\n#### {number:,}", str(number), method) == 1.0
        assert score(f"{text}\n#### {number:,}", str(number + 1), method) == 0.0


@given(st.text(alphabet="0123456789.,$-# \n%/e^*\\{}frac"))
def test_scorer_accepts_any_text(text: str) -> None:
    for method in ("strict", "flexible", "math"):
        assert score(text, "7", method) in (0.0, 1.0)


ADVERSARIAL = {
    "tower": "#### 9**9**9**9",
    "latex tower": "\\boxed{9^{9^{9^{9}}}}",
    "exponent": "#### 1e999999999",
    "braces": "{" * 3_000_000,
    "boxes": "\\boxed{" * 300_000,
    "closed braces": "\\boxed{" + "{" * 1_000_000 + "}" * 1_000_000 + "}",
    "digits": "#### " + "9" * 100_000,
    "digits and commas": "#### " + "1,111" * 50_000,
    "points": "#### " + "1." * 500_000,
    "minus": "-" * 1_000_000,
    "fractions": "\\frac" * 200_000,
    "nested fractions": "#### " + "\\frac{" * 5_000 + "1" + "}{1}" * 5_000,
    "slashes": "#### " + "1/" * 500_000,
    "spaces": "#### 1" + " " * 2_000_000 + "%",
    "marks": "#### " * 400_000,
    "nul": "#### \0 7\0",
    "division by zero": "#### 1/0",
    "surrogate": "#### \ud800 7",
    "other digits": "#### ٧ ⁷",
}


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_adversarial_responses_are_scored_quickly(name: str) -> None:
    start = time.monotonic()
    for method in ("strict", "flexible", "math"):
        assert score(ADVERSARIAL[name], "123456", method) == 0.0
    assert time.monotonic() - start < 1.0


@pytest.mark.parametrize("method", ["strict", "flexible", "math"])
def test_a_ground_truth_without_number_is_an_error(method: str) -> None:
    with pytest.raises(ValueError, match="ground truth 'seven' contains no number"):
        score("#### 7", "seven", method)  # type: ignore[arg-type]
