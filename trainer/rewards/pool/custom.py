"""Load the user's reward function from a file."""

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

from trainer.rewards.scoring import ARGUMENTS, BATCH_ARGUMENTS, ScoreFunction, takes_batches
from trainer.run import user_code

_KEY = "reward.custom_reward_function"


def check_file(path: str) -> str:
    """Absolute path of ``reward.custom_reward_function.path``. Raises ValueError if the file does not exist."""
    return str(user_code.check_file(path, f"{_KEY}.path={path}"))


def load_function(path: str, name: str, kwargs: Mapping[str, Any]) -> ScoreFunction:
    """Load the function ``name`` of the file, for single responses or whole batches, with ``kwargs`` bound.

    Raises ValueError, one line, if the file does not load, has no such function, or the function has another signature.
    """
    if taken := sorted(kwargs.keys() & (ARGUMENTS | BATCH_ARGUMENTS)):
        raise ValueError(f"{_KEY}.reward_kwargs: {', '.join(taken)} is passed with every response; choose another name")
    function = user_code.load_function(path, name, f"{_KEY}.path={path}")
    # Bind the signature now: a wrong parameter name fails at start instead of failing every reward of the first step.
    try:
        given = dict.fromkeys(sorted(BATCH_ARGUMENTS if takes_batches(function) else ARGUMENTS)) | dict(kwargs)
        inspect.signature(function).bind(**given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{_KEY}.path={path}: {name} must take {', '.join(given)} as keywords: {error}") from error
    return partial(function, **kwargs) if kwargs else function
