import pytest

from trainer.rewards import exact_match
from trainer.rewards.registry import check_data_sources, compute_score


def test_exact_match_wants_the_letter_and_an_end() -> None:
    assert exact_match.score("012359", "012359", finished=True) == 1.0
    assert exact_match.score("012359", "012359", finished=False) == 0.0
    assert exact_match.score("012359 ", "012359", finished=True) == 0.0


@pytest.mark.parametrize(
    ("source", "answer", "truth", "finished", "expected"),
    [
        ("openai/gsm8k", "so\n#### 72", "72", True, 1.0),
        ("openai/gsm8k", "so 72", "72", True, 0.0),  # strict
        ("sort_digits", "0123", "0123", True, 1.0),
        ("sort_digits", "0123", "0123", False, 0.0),
        ("exact_match", "7", 7, True, 1.0),  # a ground truth that the file holds as a number
        ("openai/gsm8k", "#### 7", 7, True, 1.0),
    ],
)
def test_data_source_chooses_the_scorer(source: str, answer: str, truth: object, finished: bool, expected: float) -> None:
    assert compute_score(source, answer, truth, {"finished": finished}) == expected


def test_unknown_data_source_names_the_known_and_the_way_out() -> None:
    check_data_sources(["openai/gsm8k", "sort_digits"])
    with pytest.raises(ValueError) as error:
        check_data_sources(["openai/gsm8k", "openai/gsm8"])
    text = str(error.value)
    assert "'openai/gsm8'" in text and "did you mean 'openai/gsm8k'" in text and "sort_digits" in text
    assert "reward.custom_reward_function.path" in text and "\n" not in text
