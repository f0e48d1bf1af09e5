from pathlib import Path
from typing import Any

import pytest

from tests.trainer.rewards.config import reward_config
from trainer.rewards.pool.runner import Response, RewardRunner, Score
from trainer.rewards.pool.worker import resolve
from trainer.rewards.rules.reward_registry import (
    check_data_sources,
    compute_score,
    may_ask_judge,
    scores_by_source,
    with_own_function,
)


def test_exact_match_requires_equal_text_and_a_finished_response() -> None:
    def exact_match(answer: str, *, finished: bool) -> Any:
        return compute_score("exact_match", answer, "012359", {"finished": finished}, reward_config())

    assert exact_match("012359", finished=True) == 1.0
    assert exact_match("012359", finished=False) == 0.0
    assert exact_match("012359 ", finished=True) == 0.0


@pytest.mark.parametrize("source", ["openai/gsm8k", "lighteval/MATH", "math_dapo", "exact_match", "calculator"])
def test_a_row_without_a_ground_truth_has_no_score(source: str) -> None:
    """Compared as text, the response None would be right."""
    with pytest.raises(ValueError, match=r"the row has no ground truth: reward_model\.ground_truth is null"):
        compute_score(source, r"None #### None \boxed{None}", None, {"finished": True}, reward_config())


@pytest.mark.parametrize(
    ("source", "answer", "truth", "finished", "expected"),
    [
        ("openai/gsm8k", "so\n#### 72", "72", True, 1.0),
        ("openai/gsm8k", "so 72", "72", True, 0.0),  # strict
        ("sort_digits", "0123", "0123", True, 1.0),
        ("sort_digits", "0123", "0123", False, 0.0),
        ("exact_match", "7", 7, True, 1.0),  # a ground truth that the file holds as a number
        ("openai/gsm8k", "#### 7", 7, True, 1.0),
        ("lighteval/MATH", r"\boxed{\frac{1}{2}}", "0.5", True, 1.0),
        ("DigitalLearningGmbH/MATH-lighteval", r"\boxed{3}", "4", True, 0.0),
        ("HuggingFaceH4/MATH-500", r"\boxed{4}", "4", True, 1.0),
        ("numina_olympiads", r"\boxed{4}", "4", True, 1.0),
    ],
)
def test_data_source_chooses_the_scorer(source: str, answer: str, truth: object, finished: bool, expected: float) -> None:
    assert compute_score(source, answer, truth, {"finished": finished}, reward_config()) == expected


@pytest.mark.parametrize("source", ["math_dapo", "math", "math_dapo_reasoning", "aime2024", "aime_2025"])
def test_sources_in_dapos_format_have_its_scores(source: str) -> None:
    score: Any = compute_score(source, "Answer: 4", "4", {}, reward_config())
    assert score == {"score": 1.0, "acc": True, "pred": "4"}


@pytest.mark.parametrize("source", ["codecontests", "apps", "codeforces", "taco"])
def test_sources_of_programs_run_them(source: str) -> None:
    score: Any = compute_score(source, "print(input())", {"inputs": ["7"], "outputs": ["7"]}, {}, reward_config())
    assert score == {"score": 1.0, "acc": 1.0}


def test_keys_reach_the_scorers() -> None:
    by_value = reward_config(gsm8k={"method": "math"})
    assert compute_score("openai/gsm8k", "It is $18.00.", "18", {}, by_value) == 1.0
    assert compute_score("openai/gsm8k", "It is $18.00.", "18", {}, reward_config()) == 0.0
    boxed: Any = compute_score("math_dapo", "Answer: 4", "4", {}, reward_config(math_dapo={"strict_box_verify": True}))
    assert boxed["score"] == -1.0
    tests = {"inputs": ["7", "8"], "outputs": ["7", "7"]}
    all_or_none: Any = compute_score("apps", "print(7)", tests, {}, reward_config(code={"partial": False}))
    assert all_or_none["score"] == 1.0  # both are 7
    half: Any = compute_score("apps", "print(input())", tests, {}, reward_config())
    assert half["score"] == 0.5


def test_one_scorer_for_all_sources() -> None:
    config = reward_config(scorer="math")
    assert compute_score("of my own", r"\boxed{4}", "4", {}, config) == 1.0
    assert compute_score("openai/gsm8k", r"\boxed{4}", "4", {}, config) == 1.0
    assert scores_by_source(reward_config()) and not scores_by_source(config)
    assert not scores_by_source(reward_config(custom_reward_function={"path": "f.py"}))
    assert not may_ask_judge(reward_config()) and may_ask_judge(reward_config(scorer="judge"))
    with pytest.raises(ValueError, match="'of my own' has no scorer"):
        compute_score("of my own", "", "4", {}, reward_config())


def test_unknown_data_source_raises_with_known_names_and_remedy() -> None:
    check_data_sources(["openai/gsm8k", "sort_digits"])
    with pytest.raises(ValueError) as error:
        check_data_sources(["openai/gsm8k", "openai/gsm8"])
    text = str(error.value)
    assert "'openai/gsm8'" in text and "did you mean 'openai/gsm8k'" in text and "sort_digits" in text and "aime*" in text
    assert "reward.scorer=gsm8k|math" in text and "reward.custom_reward_function.path" in text and "\n" not in text


def test_function_of_a_file_is_a_scorer(tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text("def f(data_source, solution_str, ground_truth, extra_info): return 0.25 * len(solution_str)")
    with RewardRunner(reward_config(num_workers=0, scorer=f"{tmp_path}/my.py:f")) as runner:
        assert runner.score([Response("any", "four", "", {}, True)]) == [Score(1.0, {}, None)]
    with pytest.raises(ValueError, match=r"my\.py: my\.py has no function g; it has f"):
        resolve(with_own_function(reward_config(scorer=f"{tmp_path}/my.py:g")))
    with pytest.raises(ValueError, match=r"reward\.scorer=gsm9k is not known \(did you mean gsm8k\?\); known: code, exact_"):
        with_own_function(reward_config(scorer="gsm9k"))
    assert with_own_function(reward_config(scorer="math")).scorer == "math"
