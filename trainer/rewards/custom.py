"""The user's reward function, from a file."""

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

from trainer import user_code
from trainer.rewards.scoring import ARGUMENTS, ScoreFunction

_KEY = "reward.custom_reward_function"


def check_file(path: str) -> str:
    """The file of ``reward.custom_reward_function.path``, absolute. Raises ValueError if it is not there."""
    return str(user_code.check_file(path, f"{_KEY}.path={path}"))


def load_function(path: str, name: str, kwargs: Mapping[str, Any]) -> ScoreFunction:
    """The function ``name`` of the file, to be called with ``kwargs`` besides what every scorer gets.

    Raises ValueError, one line, if the file does not load or has no such function, or one that cannot be called so.
    """
    if taken := sorted(kwargs.keys() & ARGUMENTS):
        raise ValueError(f"{_KEY}.reward_kwargs: {', '.join(taken)} comes with every answer; choose another name")
    function = user_code.load_function(path, name, f"{_KEY}.path={path}")
    given = dict.fromkeys(sorted(ARGUMENTS)) | dict(kwargs)
    try:
        inspect.signature(function).bind(**given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{_KEY}.path={path}: {name} must take {', '.join(given)} as keywords: {error}") from error
    return partial(function, **kwargs) if kwargs else function
