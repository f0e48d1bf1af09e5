"""Data files of a task of one's own: distinct problems from a function, split into training and held-out ones."""

import argparse
import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from data_preprocess.writer import rl_row, write
from workers.seeding import seed_of

Problem = tuple[str, str]
"""A prompt, and its answer: what the score compares a response with."""
Turns = list[dict[str, Any]]
"""Messages of a conversation after its prompt, as in OpenAI's chat completions."""
DRAWS = 20
"""Draws per problem asked for, before the problems that were found are taken as all there are."""


def write_task(
    make_problem: Callable[[Random], Problem],
    *,
    name: str,
    example: Callable[[Random, str, str], Turns] | None = None,
    tools: Sequence[dict[str, Any]] = (),
    worse: Callable[[Random, str, str], str] | None = None,
    argv: Sequence[str] | None = None,
) -> None:
    """Parse the command line and write train.parquet and test.parquet, for RL and for the warm start. No problem occurs twice.

    A prompt that is drawn with several answers keeps the first; with an example each of them is a problem.

    name: the data source. example: worked example of a problem, for the column messages; None: the column response has the
    answer. tools: function schemas, for the column tools. worse: a response that is worse than the answer, for the columns chosen
    and rejected.
    """
    parser = argparse.ArgumentParser(description="Write train.parquet and test.parquet")
    parser.add_argument("--local_save_dir", default="data", help="(default: %(default)s)")
    parser.add_argument("--train_size", type=int, default=20000, help="problems, at most (default: %(default)s)")
    parser.add_argument("--test_size", type=int, default=256, help="held-out problems (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    args = parser.parse_args(argv)
    random, wanted = Random(seed_of(args.seed, "problems")), args.test_size + args.train_size
    problems: dict[str | Problem, Problem] = {}  # in the order of drawing
    for _ in range(DRAWS * wanted):
        if len(problems) == wanted:
            break
        problem = make_problem(random)
        # The answer of a conversation is what the other side knows: with another one the same first message has another course.
        problems.setdefault(problem[0] if example is None else problem, problem)
    if len(problems) < 2 * args.test_size:
        parser.error(
            f"make_problem gives {len(problems)} different problems, and {args.test_size} are held out: training needs as many; "
            "make more, or lower --test_size"
        )
    drawn = list(problems.values())
    for split, part in (("test", drawn[: args.test_size]), ("train", drawn[args.test_size :])):
        rows = []
        for i, (prompt, answer) in enumerate(part):
            row = rl_row(data_source=name, prompt=prompt, ability=name, ground_truth=answer, split=split, index=i)
            if example is None:
                row["response"] = answer
            else:
                row["messages"] = [*row["prompt"], *example(random, prompt, answer)]
            if worse is not None:
                row |= {"chosen": answer, "rejected": worse(random, prompt, answer)}
            rows.append(row | ({"tools": json.dumps(list(tools))} if tools else {}))
        write(rows, args.local_save_dir, split)
