"""Tasks that a tool solves: problems for RL, and conversations for a warm start, in which the tool is called, or not."""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from data_preprocess.writer import chat, rl_row, write
from trainer.data.order import permutation
from workers.seeding import seed_of

OFTEN, SELDOM, BROKEN = 0.9, 0.12, 0.1
"""Probability of a correct call for the first problems, for all others, and of a call with a mistake."""


@dataclass(frozen=True)
class ToolTask:
    """problem: the question with a number, what the tool is called with, and the answer. call: arguments and result of a call,
    and the answer that the result has. misread: a query with a mistake. guess: what is answered without a call.
    """

    schema: dict[str, Any]
    problem: Callable[[int], tuple[str, str, str]]
    call: Callable[[str], tuple[dict[str, Any], str, str]]
    misread: Callable[[str, np.random.Generator], str]
    guess: Callable[[np.random.Generator], str]


def write_files(
    argv: Sequence[str] | None,
    make: Callable[[argparse.Namespace], ToolTask],
    *,
    name: str,
    ability: str,
    problems: int,
    train_size: int,
    about: str,
) -> None:
    """Parse the command line and write train.parquet, test.parquet and sft.parquet. No problem occurs twice in these files.

    name: the data source. problems: how many there are. train_size: a default.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--local_save_dir", "--local_dir", default=f"~/data/{name}", help="(default: %(default)s)")
    parser.add_argument("--train_size", type=int, default=train_size, help="problems for RL (default: %(default)s)")
    parser.add_argument("--test_size", type=int, default=256, help="held-out problems (default: %(default)s)")
    parser.add_argument("--sft_size", type=int, default=8192, help="conversations for the warm start (default: %(default)s)")
    parser.add_argument("--called", type=float, default=0.3, help="share of problems with frequent calls (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of problems and conversations (default: %(default)s)")
    args = parser.parse_args(argv)
    sizes = (args.test_size, args.train_size, args.sft_size)
    wanted = sum(sizes)
    if wanted > problems:
        parser.error(f"{' + '.join(map(str, sizes))} = {wanted} problems are requested, but there are only {problems}")

    task = make(args)
    # Slices of one permutation of all problems cannot overlap.
    chosen = iter(map(int, permutation(problems, seed_of(args.seed, name))[:wanted]))
    test, train, sft = ([*islice(chosen, size)] for size in sizes)
    for split, numbers in (("train", train), ("test", test)):
        rows = []
        for i, (question, _, answer) in enumerate(map(task.problem, numbers)):
            rows.append(rl_row(data_source=name, prompt=question, ability=ability, ground_truth=answer, split=split, index=i))
        write(rows, args.local_save_dir, split)
    random = np.random.Generator(np.random.PCG64(seed_of(args.seed, "conversations")))
    if sft:
        rows = [_conversation(task, number, OFTEN if number < args.called * problems else SELDOM, random) for number in sft]
        write(rows, args.local_save_dir, "sft")


def misread_digit(number: str, random: np.random.Generator) -> str:
    """The number with another last digit."""
    return number[:-1] + str((int(number[-1]) + int(random.integers(1, 10))) % 10)


def _conversation(task: ToolTask, number: int, called: float, random: np.random.Generator) -> dict[str, Any]:
    """A row for fine-tuning. called: probability of a correct call.

    The model that learns from it calls the tool for the first problems, if greedy, and at times for all others, if sampled: RL
    has something to reinforce, and the accuracy has room to rise.
    """
    question, query, _ = task.problem(number)
    kind = random.random()
    if kind >= called + BROKEN:
        return _row(task, question, [{"role": "assistant", "content": task.guess(random)}])
    is_broken, in_call = kind >= called, random.random() < 0.5
    arguments, result, answer = task.call(task.misread(query, random) if is_broken and in_call else query)
    if is_broken and not in_call:
        answer = misread_digit(answer, random)
    function = {"name": task.schema["function"]["name"], "arguments": json.dumps(arguments)}
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": "", "tool_calls": [{"id": "call_0", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "call_0", "content": result},
        {"role": "assistant", "content": answer},
    ]
    return _row(task, question, messages)


def _row(task: ToolTask, question: str, response: list[dict[str, Any]]) -> dict[str, Any]:
    return {"messages": [*chat(question), *response], "tools": json.dumps([task.schema])}
