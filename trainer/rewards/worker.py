"""A scoring process: reads chunks of answers from its socket, writes a line for each score."""

import json
import os
import pickle
import socket
from contextlib import suppress

from trainer.rewards.custom import load_function
from trainer.rewards.registry import compute_score
from trainer.rewards.scoring import ScoreFunction, judge
from workers.controller.stop import die_with_parent


def resolve(path: str | None, name: str) -> ScoreFunction:
    """The user's function if a file is given, else the scorers by data source."""
    return compute_score if path is None else load_function(path, name)


def main(fd: int, parent: int) -> None:
    """In: a pickled (path, name) of the function, then pickled lists of Answer. Out, as lines of JSON: ``null`` once
    ready, or the text of what went wrong; then [value, extra, error] for each answer as soon as it is known, so that
    the other side sees which answer is late or fatal. Ends when the socket does.
    """
    die_with_parent(parent)
    os.set_inheritable(fd, False)  # a process that a reward starts must not keep the socket open
    connection = socket.socket(fileno=fd)
    stream = connection.makefile("rb")

    def say(message: object) -> None:
        connection.sendall(json.dumps(message).encode() + b"\n")

    with suppress(EOFError, ConnectionError):  # the other side is gone: nobody is left to tell
        try:
            function = resolve(*pickle.load(stream))
        except ValueError as error:
            say(str(error))
            return
        say(None)
        while True:
            for answer in pickle.load(stream):
                score = judge(function, answer)
                say((score.value, score.extra, score.error))
