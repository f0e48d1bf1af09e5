"""Built-in scorers, and the scorer of each data source."""

import difflib
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from configs.schema.ppo import NO_RULES, ScoringConfig
from trainer.rewards.rules import code, gsm8k, judge, math, math_dapo
from trainer.rewards.scoring import ScoreFunction

Scorer = Callable[[str, Any, dict[str, Any], ScoringConfig], float | dict[str, Any]]
"""(solution_str, ground_truth, extra_info, config) -> score, or a dict with "score"."""


def _text(ground_truth: Any) -> str:
    if ground_truth is None:
        raise ValueError("the row has no ground truth: reward_model.ground_truth is null")
    return str(ground_truth)


def _gsm8k(solution_str: str, ground_truth: Any, extra_info: dict[str, Any], config: ScoringConfig) -> float:
    return gsm8k.score(solution_str, _text(ground_truth), config.gsm8k.method)


def _math(solution_str: str, ground_truth: Any, extra_info: dict[str, Any], config: ScoringConfig) -> float:
    return math.score(solution_str, _text(ground_truth))


def _math_dapo(solution_str: str, ground_truth: Any, extra_info: dict[str, Any], config: ScoringConfig) -> dict[str, Any]:
    return math_dapo.score(solution_str, _text(ground_truth), strict_box_verify=config.math_dapo.strict_box_verify)


def _exact_match(solution_str: str, ground_truth: Any, extra_info: dict[str, Any], config: ScoringConfig) -> float:
    """1 if the response equals the ground truth and was ended by the model; 0 otherwise, also if it was truncated."""
    truth = _text(ground_truth)
    return float(extra_info["finished"] and solution_str == truth)


def _tool_answer(solution_str: str, ground_truth: Any, extra_info: dict[str, Any], config: ScoringConfig) -> float:
    """As exact_match, for the text after the last tool result: the response has calls and results, too."""
    return _exact_match(solution_str.rpartition("</tool_response>")[2], ground_truth, extra_info, config)


def _code(solution_str: str, ground_truth: Any, extra_info: dict[str, Any], config: ScoringConfig) -> dict[str, float]:
    return code.score(solution_str, ground_truth, config.code, seconds=config.timeout)


def _judge(solution_str: str, ground_truth: Any, extra_info: dict[str, Any], config: ScoringConfig) -> float:
    return judge.score(solution_str, ground_truth, extra_info, config.judge)


def _none(solution_str: str, ground_truth: Any, extra_info: dict[str, Any], config: ScoringConfig) -> float:
    """Constant 0, to which reward models add their scores."""
    return 0.0


SCORERS: dict[str, Scorer] = {
    "gsm8k": _gsm8k,
    "math": _math,
    "math_dapo": _math_dapo,
    "exact_match": _exact_match,
    "tool_answer": _tool_answer,
    "code": _code,
    "judge": _judge,
    NO_RULES: _none,
}
"""Values of ``reward.scorer``."""

DATA_SOURCES: dict[str, str] = {
    "openai/gsm8k": "gsm8k",
    **dict.fromkeys(("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"), "math"),
    **dict.fromkeys(("numina_aops_forum", "numina_synthetic_math", "numina_amc_aime"), "math"),
    **dict.fromkeys(("numina_synthetic_amc", "numina_cn_k12", "numina_olympiads"), "math"),
    # «math» too: verl uses this data source for data in DAPO's format.
    **dict.fromkeys(("math_dapo", "math", "math_dapo_reasoning"), "math_dapo"),
    **dict.fromkeys(("codecontests", "apps", "codeforces", "taco"), "code"),
    **dict.fromkeys(("sort_digits", "exact_match"), "exact_match"),
    **dict.fromkeys(("calculator", "search_local"), "tool_answer"),
    "judge": "judge",
}
"""Scorer of each data source. Data sources that start with aime also use math_dapo."""


def with_own_function(config: ScoringConfig) -> ScoringConfig:
    """Resolve ``reward.scorer=my.py:fn`` to a custom reward function. Raises ValueError for an unknown scorer."""
    path, colon, name = (config.scorer or "").rpartition(":")
    if colon and path.endswith(".py"):
        function = replace(config.custom_reward_function, path=path, name=name)
        return replace(config, scorer=None, custom_reward_function=function)
    if config.scorer is not None and config.scorer not in SCORERS:
        near = difflib.get_close_matches(config.scorer, SCORERS, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(
            f"reward.scorer={config.scorer} is not known{hint}; known: {', '.join(sorted(SCORERS))}, "
            "or FILE.py:FUNCTION of your own"
        )
    return config


def check_data_sources(names: Iterable[str]) -> None:
    """Raise ValueError, with the known names, if one of the data sources has no scorer."""
    for name in sorted(name for name in {*map(str, names)} if _scorer_of(name) is None):
        near = difflib.get_close_matches(name, DATA_SOURCES, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(
            f"data_source {name!r} has no scorer{hint}; known: {', '.join(sorted(DATA_SOURCES))}, aime*. "
            f"Set one scorer for all responses, reward.scorer={'|'.join(SCORERS)}, or "
            "a function of your own: reward.custom_reward_function.path=FILE.py "
            "reward.custom_reward_function.name=FUNCTION"
        )


def scores_by_source(config: ScoringConfig) -> bool:
    """Whether data sources select the scorers, that is neither a function nor one scorer for all is configured."""
    return config.custom_reward_function.path is None and config.scorer is None


def may_ask_judge(config: ScoringConfig) -> bool:
    """Whether responses may wait for a judge, in which case several requests should be in flight."""
    return config.custom_reward_function.path is None and (config.scorer == "judge" or config.judge.url is not None)


def built_in(config: ScoringConfig) -> ScoreFunction:
    """Score function used without a user's function."""
    return partial(compute_score, config=config)


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any], config: ScoringConfig
) -> float | dict[str, Any]:
    """Score by ``reward.scorer`` or, if null, by the data source's scorer. Raises ValueError if there is none."""
    name = config.scorer or _scorer_of(data_source)
    if name is None:
        check_data_sources([data_source])
        raise AssertionError(data_source)
    return SCORERS[name](solution_str, ground_truth, extra_info, config)


def _scorer_of(data_source: str) -> str | None:
    return "math_dapo" if data_source.startswith("aime") else DATA_SOURCES.get(data_source)
