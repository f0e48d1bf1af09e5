"""Scoring process: loads the score function, reads chunks of responses from its socket, writes one line per score."""

import inspect
import json
import os
import pickle
import socket
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from configs.schema.ppo import ScoringConfig
from trainer.rewards.rules.reward_registry import built_in
from trainer.rewards.scoring import ARGUMENTS, BATCH_ARGUMENTS, ScoreFunction, score_all, takes_batches
from trainer.run import user_code
from workers.controller.environment import limit_memory
from workers.controller.stacks import enable_stack_reports
from workers.controller.stop import die_with_parent


def resolve(config: ScoringConfig) -> ScoreFunction:
    """The user's function if a file is configured, else the built-in scorers."""
    custom = config.custom_reward_function
    return built_in(config) if custom.path is None else load_function(custom.path, custom.name, custom.reward_kwargs)


def main(fd: int, parent: int) -> None:
    """Entry point of a scoring process; returns at the end of its socket.

    Input: a pickled (ScoringConfig, threads), then pickled lists of Answer. Output, as lines of JSON: once ready, whether the
    function takes batches, or an error message; then [value, extra, error] for each response as soon as it is known, so that the
    runner knows which response is late or fatal.
    """
    die_with_parent(parent)
    enable_stack_reports()
    # A process started or forked by a reward function must not inherit the socket: the runner would never see its end.
    os.set_inheritable(fd, False)
    connection = socket.socket(fileno=fd)
    os.register_at_fork(after_in_child=partial(_close, connection))
    stream = connection.makefile("rb")

    def send(message: object) -> None:
        connection.sendall(json.dumps(message).encode() + b"\n")

    with suppress(EOFError, ConnectionError):  # the runner has disconnected
        try:
            config, threads = pickle.load(stream)
            if config.memory_limit_mb is not None:
                limit_memory(config.memory_limit_mb << 20)
            function = resolve(config)
        except ValueError as error:
            send(str(error))
            return
        send(takes_batches(function))
        while True:
            for score in score_all(function, pickle.load(stream), threads):
                send((score.value, score.extra, score.error))


def _close(connection: socket.socket) -> None:
    """Close it for good: ``close`` would wait for the file that reads from it."""
    if (fd := connection.detach()) >= 0:
        os.close(fd)


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
