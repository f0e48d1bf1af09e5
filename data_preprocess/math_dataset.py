"""Convert MATH (Hendrycks et al. 2021, arXiv:2103.03874) to parquet.

python -m data_preprocess.math_dataset --local_save_dir DIR
"""

import re
from collections.abc import Sequence
from typing import Any

from data_preprocess.source import preprocess, text
from data_preprocess.writer import rl_row

DATA_SOURCE = "DigitalLearningGmbH/MATH-lighteval"
INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."


def last_boxed(solution: str) -> str:
    r"""Content of the last ``\boxed{...}`` or ``\fbox{...}``, nested braces included; 5 for ``\boxed 5``.

    Raises ValueError if there is no box or it is not closed.
    """
    starts = list(re.finditer(r"\\(?:boxed|fbox)(?:\s*(\{)|\s+([^\s$.]+))", solution))
    if not starts:
        raise ValueError(f"the solution has no \\boxed answer: {solution[-60:]!r}")
    start = starts[-1]
    if start[2] is not None:
        return start[2]
    depth = 1
    for brace in re.finditer(r"\\.|[{}]", solution[start.end() :], re.DOTALL):  # escaped braces do not group
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return solution[start.end() : start.end() + brace.start()]
    raise ValueError(f"the last \\boxed is not closed: {solution[start.start() :][:60]!r}")


def make_row(example: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    """RL row of one example. Raises KeyError for a missing field, ValueError for no text and a solution without a box."""
    problem, solution = text(example, "problem"), text(example, "solution")
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
        # Copies on the hub differ in the name of this field.
        subject=example["type"] if "type" in example else example["subject"],
    )


def main(argv: Sequence[str] | None = None) -> None:
    preprocess(argv, make_row, hub=DATA_SOURCE, config=None, save_dir="~/data/math", about="Convert MATH to parquet")


if __name__ == "__main__":
    main()
