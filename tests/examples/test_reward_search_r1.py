import pytest

from examples.reward_search_r1 import compute_score


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("It is <answer>The Nile.</answer>", 1.0),
        ("<answer>nile river</answer>", 1.0),
        ("<answer>Nile</answer> or <answer>Rhine</answer>", 0.0),
        ("<answer>a Rhine</answer>\nno: <answer>\nnile</answer>", 1.0),
        ("Nile", 0.0),
        ("", 0.0),
    ],
)
def test_the_last_answer_is_compared_without_case_articles_and_punctuation(response: str, score: float) -> None:
    assert compute_score("searchR1_nq", response, {"target": ["Nile", "the Nile River"]}, {}) == score
