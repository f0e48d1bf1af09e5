"""A scoring process: reads chunks of answers from its socket, writes a line for each score."""

import json
import os
import pickle
import resource
import socket
from contextlib import suppress

from configs.schema.ppo import ScoringConfig
from trainer.rewards.custom import load_function
from trainer.rewards.registry import built_in
from trainer.rewards.scoring import ScoreFunction, judge_all, takes_batches
from workers.controller.stacks import answer_for_stacks
from workers.controller.stop import die_with_parent


def resolve(config: ScoringConfig) -> ScoreFunction:
    """The user's function if a file is given, else the scorers that come with the package."""
    custom = config.custom_reward_function
    return built_in(config) if custom.path is None else load_function(custom.path, custom.name, custom.reward_kwargs)


def main(fd: int, parent: int) -> None:
    """In: a pickled (ScoringConfig, threads), then pickled lists of Answer. Out, as lines of JSON: once ready, whether the
    function takes batches, or the text of what went wrong; then [value, extra, error] for each answer as soon as it is
    known, so that the other side sees which answer is late or fatal. Ends when the socket does.
    """
    die_with_parent(parent)
    answer_for_stacks()
    os.set_inheritable(fd, False)  # a process that a reward starts must not keep the socket open
    connection = socket.socket(fileno=fd)
    stream = connection.makefile("rb")

    def say(message: object) -> None:
        connection.sendall(json.dumps(message).encode() + b"\n")

    with suppress(EOFError, ConnectionError):  # the other side is gone: nobody is left to tell
        try:
            config, threads = pickle.load(stream)
            if config.memory_limit_mb is not None:
                _limit_memory(config.memory_limit_mb << 20)
            function = resolve(config)
        except ValueError as error:
            say(str(error))
            return
        say(takes_batches(function))
        while True:
            for score in judge_all(function, pickle.load(stream), threads):
                say((score.value, score.extra, score.error))


def _limit_memory(size: int) -> None:
    """An answer that makes a scorer take more fails with a MemoryError, before the machine runs out. size: bytes of data."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    bound = size if hard == resource.RLIM_INFINITY else min(size, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (bound, hard))
