"""Generate the data of `recipe=calculator`: add two numbers of three digits. Prompt ``123+456``, response ``579``.

python -m data_preprocess.calculator --local_save_dir DIR writes train.parquet and test.parquet for RL, and sft.parquet for the
warm start: conversations in which the calculator of trainer.agents.native is called, or the answer is guessed.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np

from data_preprocess.tool_task import ToolTask, misread_digit, write_files
from trainer.agents.native.calculator import calculator, evaluate

LOWEST, NUMBERS = 100, 900


def main(argv: Sequence[str] | None = None) -> None:
    about = "Generate the task of adding numbers with a calculator as a tool"
    write_files(argv, _task, name="calculator", ability="add", problems=NUMBERS**2, train_size=20000, about=about)


def _task(args: argparse.Namespace) -> ToolTask:
    return ToolTask(calculator.schema, _problem, _call, _misread, _guess)


def _problem(number: int) -> tuple[str, str, str]:
    a, b = LOWEST + number // NUMBERS, LOWEST + number % NUMBERS
    return f"{a}+{b}", f"{a}+{b}", str(a + b)


def _call(query: str) -> tuple[dict[str, Any], str, str]:
    result = str(evaluate(query))
    return {"expression": query}, result, result


def _misread(query: str, random: np.random.Generator) -> str:
    a, _, b = query.partition("+")
    return f"{misread_digit(a, random)}+{b}"


def _guess(random: np.random.Generator) -> str:
    return str(random.integers(2 * LOWEST, 2 * (LOWEST + NUMBERS)))


if __name__ == "__main__":
    main()
