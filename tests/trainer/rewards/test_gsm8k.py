import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.rewards.gsm8k import extract, score

STRICT = [
    ("so 3 + 4 = 7\n#### 7", "7"),
    ("####7", "7"),
    ("#### $1,234.50.", "1234.50"),
    ("#### -$5", "-5"),
    ("#### $-5", "-5"),
    ("#### .5", ".5"),
    ("#### 3\n#### 4", "4"),
    ("#### 4 then 9", "4"),
    ("the answer is 7", None),
    ("#### seven 7", None),
    ("", None),
]


@pytest.mark.parametrize(("text", "number"), STRICT)
def test_strict_takes_the_last_marked_number(text: str, number: str | None) -> None:
    assert extract(text, "strict") == number


@pytest.mark.parametrize(
    ("text", "number"), [("7 apples, then 12.", "12"), ("it costs $1,200,", "1200"), ("#### 3 or rather 4", "4"), ("none", None)]
)
def test_flexible_takes_the_last_number(text: str, number: str | None) -> None:
    assert extract(text, "flexible") == number


@pytest.mark.parametrize(
    ("answer", "truth", "strict", "flexible"),
    [
        ("#### 18", "18", 1.0, 1.0),
        ("#### 18.00", "18", 1.0, 1.0),
        ("#### 1,800", "1800", 1.0, 1.0),
        ("18", "18", 0.0, 1.0),
        ("#### 18, or 19", "18", 1.0, 0.0),
        ("#### 180", "18", 0.0, 0.0),
        ("#### -18", "18", 0.0, 0.0),
        ("", "18", 0.0, 0.0),
    ],
)
def test_score(answer: str, truth: str, strict: float, flexible: float) -> None:
    assert (score(answer, truth), score(answer, truth, "flexible")) == (strict, flexible)


@given(st.integers(), st.text())
def test_any_number_is_found_after_any_text(number: int, text: str) -> None:
    assert score(f"{text}\n#### {number:,}", str(number)) == 1.0
    assert score(f"{text}\n#### {number:,}", str(number + 1)) == 0.0


@given(st.text(alphabet="0123456789.,$-# \n"))
def test_no_answer_breaks_the_scorer(text: str) -> None:
    for method in ("strict", "flexible"):
        assert score(text, "7", method) in (0.0, 1.0)


def test_a_ground_truth_without_number_is_an_error() -> None:
    with pytest.raises(ValueError, match="ground truth 'seven' holds no number"):
        score("#### 7", "seven")
