"""The user's reward function, from a file."""

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

from trainer import user_code
from trainer.rewards.scoring import ARGUMENTS, BATCH_ARGUMENTS, ScoreFunction, takes_batches

_KEY = "reward.custom_reward_function"


def check_file(path: str) -> str:
    """The file of ``reward.custom_reward_function.path``, absolute. Raises ValueError if it is not there."""
    return str(user_code.check_file(path, f"{_KEY}.path={path}"))


def load_function(path: str, name: str, kwargs: Mapping[str, Any]) -> ScoreFunction:
    """The function ``name`` of the file, of an answer or of whole batches, to be called with ``kwargs`` besides what these get.

    Raises ValueError, one line, if the file does not load or has no such function, or one that cannot be called so.
    """
    if taken := sorted(kwargs.keys() & (ARGUMENTS | BATCH_ARGUMENTS)):
        raise ValueError(f"{_KEY}.reward_kwargs: {', '.join(taken)} comes with every answer; choose another name")
    function = user_code.load_function(path, name, f"{_KEY}.path={path}")
    try:
        given = dict.fromkeys(sorted(BATCH_ARGUMENTS if takes_batches(function) else ARGUMENTS)) | dict(kwargs)
        inspect.signature(function).bind(**given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{_KEY}.path={path}: {name} must take {', '.join(given)} as keywords: {error}") from error
    return partial(function, **kwargs) if kwargs else function
