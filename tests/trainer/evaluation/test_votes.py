from pathlib import Path

import pytest

from trainer.evaluation.votes import vote_function


@pytest.mark.parametrize(
    ("name", "answer", "vote"),
    [
        ("text", " 42\n", "42"),
        ("text", " ", None),
        ("boxed", r"so \boxed{1} or \boxed{ \frac{1}{2} }", r"\frac{1}{2}"),
        ("boxed", "42", None),
        ("gsm8k", "it is 1,000.", "1000"),
        ("gsm8k", "no idea", None),
    ],
)
def test_vote_of_a_response(name: str, answer: str, vote: str | None) -> None:
    assert vote_function(name)(answer) == vote


def test_vote_function_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def last(answer):\n    return answer[-1]\n")
    assert vote_function(f"{tmp_path}/mine.py:last")("abc") == "c"
    with pytest.raises(ValueError, match=r"metrics.vote=.*mine.py:first: mine.py has no function first; it has last"):
        vote_function(f"{tmp_path}/mine.py:first")
    with pytest.raises(ValueError, match=r"metrics.vote=box is not known; known: text, boxed, gsm8k, or FILE.py:FUNCTION"):
        vote_function("box")
