"""Scoring process: reads chunks of responses from its socket, writes one line per score."""

import json
import os
import pickle
import resource
import socket
from contextlib import suppress

from configs.schema.ppo import ScoringConfig
from trainer.rewards.pool.custom import load_function
from trainer.rewards.rules.reward_registry import built_in
from trainer.rewards.scoring import ScoreFunction, score_all, takes_batches
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
    # A process started by a reward function must not inherit the socket: the runner would never see its end.
    os.set_inheritable(fd, False)
    connection = socket.socket(fileno=fd)
    stream = connection.makefile("rb")

    def send(message: object) -> None:
        connection.sendall(json.dumps(message).encode() + b"\n")

    with suppress(EOFError, ConnectionError):  # the runner has disconnected
        try:
            config, threads = pickle.load(stream)
            if config.memory_limit_mb is not None:
                _limit_memory(config.memory_limit_mb << 20)
            function = resolve(config)
        except ValueError as error:
            send(str(error))
            return
        send(takes_batches(function))
        while True:
            for score in score_all(function, pickle.load(stream), threads):
                send((score.value, score.extra, score.error))


def _limit_memory(size: int) -> None:
    """Limit the data segment to ``size`` bytes, so that one response fails with MemoryError before the machine runs out."""
    # RLIMIT_DATA rather than RLIMIT_AS: libraries reserve large address ranges that they never touch.
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    bound = size if hard == resource.RLIM_INFINITY else min(size, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (bound, hard))
