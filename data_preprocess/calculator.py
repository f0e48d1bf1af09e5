"""Generate the data of `recipe=calculator`: add two numbers of three digits. Prompt ``123+456``, response ``579``.

python -m data_preprocess.calculator --local_save_dir DIR writes train.parquet and test.parquet for RL, and sft.parquet for the
warm start: conversations in which the calculator of trainer.agents.native is called, or the answer is guessed. No problem occurs
twice in these files.
"""

import argparse
import json
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np

from data_preprocess.writer import chat, rl_row, write
from trainer.agents.native.calculator import calculator, evaluate
from trainer.data.order import permutation
from workers.seeding import seed_of

DATA_SOURCE = "calculator"
LOWEST, NUMBERS = 100, 900
OFTEN, SELDOM, BROKEN = 0.9, 0.12, 0.1
"""Probability of a correct call where the first number is low, where it is not, and of a call with a mistake."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Generate the task of adding numbers with a calculator as a tool")
    parser.add_argument("--local_save_dir", "--local_dir", default="~/data/calculator", help="(default: %(default)s)")
    parser.add_argument("--train_size", type=int, default=20000, help="problems for RL (default: %(default)s)")
    parser.add_argument("--test_size", type=int, default=256, help="held-out problems (default: %(default)s)")
    parser.add_argument("--sft_size", type=int, default=8192, help="conversations for the warm start (default: %(default)s)")
    parser.add_argument("--called", type=float, default=0.3, help="share of problems with frequent calls (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of problems and conversations (default: %(default)s)")
    args = parser.parse_args(argv)
    sizes = (args.test_size, args.train_size, args.sft_size)
    wanted = sum(sizes)
    if wanted > NUMBERS**2:
        parser.error(f"{' + '.join(map(str, sizes))} = {wanted} problems are requested, but there are only {NUMBERS**2}")

    # Slices of one permutation of all problems cannot overlap.
    chosen = permutation(NUMBERS**2, seed_of(args.seed, "calculator"))[:wanted]
    problems = iter([(LOWEST + i // NUMBERS, LOWEST + i % NUMBERS) for i in map(int, chosen)])
    test, train, sft = ([*islice(problems, size)] for size in sizes)
    for split, pairs in (("train", train), ("test", test)):
        rows = [
            rl_row(data_source=DATA_SOURCE, prompt=f"{a}+{b}", ability="add", ground_truth=str(a + b), split=split, index=i)
            for i, (a, b) in enumerate(pairs)
        ]
        write(rows, args.local_save_dir, split)
    low = LOWEST + args.called * NUMBERS
    random = np.random.Generator(np.random.PCG64(seed_of(args.seed, "conversations")))
    if sft:
        write([_conversation(a, b, OFTEN if a < low else SELDOM, random) for a, b in sft], args.local_save_dir, "sft")


def _conversation(a: int, b: int, called: float, random: np.random.Generator) -> dict[str, Any]:
    """A row for fine-tuning. called: probability of a correct call.

    The model that learns from it calls the tool for low numbers, if greedy, and at times for all others, if sampled: RL has
    something to reinforce, and the accuracy has room to rise.
    """
    kind = random.random()
    if kind >= called + BROKEN:
        guess = random.integers(2 * LOWEST, 2 * (LOWEST + NUMBERS))
        return _row(chat(f"{a}+{b}"), [{"role": "assistant", "content": str(guess)}])
    is_broken, in_call = kind >= called, random.random() < 0.5
    expression = f"{_misread(a, random) if is_broken and in_call else a}+{b}"
    result = int(evaluate(expression))
    answer = _misread(result, random) if is_broken and not in_call else result
    function = {"name": calculator.name, "arguments": json.dumps({"expression": expression})}
    call = {"id": "call_0", "type": "function", "function": function}
    return _row(
        chat(f"{a}+{b}"),
        [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_0", "content": str(result)},
            {"role": "assistant", "content": str(answer)},
        ],
    )


def _row(prompt: list[dict[str, str]], response: list[dict[str, Any]]) -> dict[str, Any]:
    return {"messages": [*prompt, *response], "tools": json.dumps([calculator.schema])}


def _misread(number: int, random: np.random.Generator) -> int:
    """The number with another last digit."""
    return number - number % 10 + (number % 10 + int(random.integers(1, 10))) % 10


if __name__ == "__main__":
    main()
