"""The user's reward function, from a file."""

import importlib.util
import inspect
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from trainer.rewards.scoring import ARGUMENTS, ScoreFunction, describe

_MODULE = "tandem_custom_reward"
_KEY = "reward.custom_reward_function"


def check_file(path: str) -> Path:
    """The file of ``reward.custom_reward_function.path``, absolute. Raises ValueError if it is not there."""
    file = Path(path).expanduser().absolute()
    if not file.is_file():
        there = ", ".join(sorted(entry.name for entry in file.parent.glob("*.py"))) or "no Python file"
        raise ValueError(f"{_KEY}.path={path}: no such file; {file.parent} has {there}")
    return file


def load_function(path: str, name: str, kwargs: Mapping[str, Any]) -> ScoreFunction:
    """The function ``name`` of the file, to be called with ``kwargs`` besides what every scorer gets.

    Raises ValueError, one line, if the file does not load or has no such function.
    """
    file = check_file(path)
    if taken := sorted(kwargs.keys() & ARGUMENTS):
        raise ValueError(f"{_KEY}.reward_kwargs: {', '.join(taken)} comes with every answer; choose another name")
    spec = importlib.util.spec_from_file_location(_MODULE, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{_KEY}.path={path}: not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module  # dataclasses and pickle look a class's module up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's file may raise anything
        raise ValueError(f"{_KEY}.path={path} does not load: {describe(error)}") from error
    functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
    function = vars(module).get(name)
    if not callable(function):
        raise ValueError(f"{_KEY}.name={name}: {file} has no such function; it has {', '.join(functions) or 'none'}")
    return partial(function, **kwargs) if kwargs else function
