"""Which scorer judges which data source."""

import difflib
from collections.abc import Callable, Iterable
from typing import Any

from trainer.rewards import exact_match, gsm8k

Scorer = Callable[[str, Any, dict[str, Any]], float]
"""(solution_str, ground_truth, extra_info) -> score"""


def _gsm8k(solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    return gsm8k.score(solution_str, str(ground_truth))


def _exact_match(solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    return exact_match.score(solution_str, str(ground_truth), finished=extra_info["finished"])


SCORERS: dict[str, Scorer] = {"openai/gsm8k": _gsm8k, "sort_digits": _exact_match, "exact_match": _exact_match}


def check_data_sources(names: Iterable[str]) -> None:
    """Raises ValueError, naming what is known, if one of the data sources has no scorer."""
    for name in sorted(set(names) - SCORERS.keys()):
        near = difflib.get_close_matches(name, SCORERS, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(
            f"data_source {name!r} has no scorer{hint}; known: {', '.join(sorted(SCORERS))}. "
            "Give a function of your own: reward.custom_reward_function.path=FILE.py reward.custom_reward_function.name=FUNCTION"
        )


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """The score by the data source's own scorer: what runs where the user gives no function."""
    check_data_sources([data_source])
    return SCORERS[data_source](solution_str, ground_truth, extra_info)
