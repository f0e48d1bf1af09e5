"""MATH (Hendrycks et al. 2021, arXiv:2103.03874) to parquet: python -m data_preprocess.math_dataset --local_save_dir DIR"""

import re
from collections.abc import Sequence
from typing import Any

from data_preprocess.source import preprocess
from data_preprocess.writer import rl_row

DATA_SOURCE = "DigitalLearningGmbH/MATH-lighteval"
INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."


def last_boxed(solution: str) -> str:
    r"""What the last ``\boxed{...}`` (or ``\fbox{...}``) holds, braces and all; ``\boxed 5`` holds 5.

    Raises ValueError if there is no box, or if it is not closed.
    """
    starts = list(re.finditer(r"\\(?:boxed|fbox)(?:\s*(\{)|\s+([^\s$.]+))", solution))
    if not starts:
        raise ValueError(f"the solution has no \\boxed answer: {solution[-60:]!r}")
    start = starts[-1]
    if start[2] is not None:
        return start[2]
    depth = 1
    for brace in re.finditer(r"\\.|[{}]", solution[start.end() :], re.DOTALL):  # \{ and \} group nothing in TeX
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return solution[start.end() : start.end() + brace.start()]
    raise ValueError(f"the last \\boxed is not closed: {solution[start.start() :][:60]!r}")


def make_row(example: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    problem, solution = example["problem"], example["solution"]
    return rl_row(
        data_source=DATA_SOURCE,
        prompt=f"{problem} {INSTRUCTION}",
        ability="math",
        ground_truth=last_boxed(solution),
        split=split,
        index=index,
        answer=solution,
        question=problem,
        level=example["level"],
        subject=example["type"] if "type" in example else example["subject"],  # the copies on the hub differ
    )


def main(argv: Sequence[str] | None = None) -> None:
    preprocess(argv, make_row, hub=DATA_SOURCE, config=None, save_dir="~/data/math", about="MATH to parquet")


if __name__ == "__main__":
    main()
