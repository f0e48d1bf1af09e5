"""Convert GSM8K (Cobbe et al. 2021, arXiv:2110.14168) to parquet.

python -m data_preprocess.gsm8k --local_save_dir DIR
"""

from collections.abc import Sequence
from typing import Any

from data_preprocess.source import preprocess, text
from data_preprocess.writer import rl_row
from trainer.rewards.rules.gsm8k import extract

DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'

TOOL = "calc_gsm8k_reward"
"""Name of the tool that checks answers (examples/tools/gsm8k.yaml), as in verl."""


def final_number(answer: str) -> str:
    """Number after ``####``, without commas. Raises ValueError if there is none."""
    number = extract(answer, "strict")
    if number is None:
        raise ValueError(f"the answer has no number after ####: {answer[-60:]!r}")
    return number


def make_row(example: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    """RL row of one example. Raises KeyError for a missing field, ValueError for no text and an answer without a number."""
    question, answer = text(example, "question"), text(example, "answer")
    number = final_number(answer)
    return rl_row(
        data_source=DATA_SOURCE,
        prompt=f"{question} {INSTRUCTION}",
        ability="math",
        ground_truth=number,
        split=split,
        index=index,
        answer=answer,
        question=question,
        tools_kwargs={TOOL: {"create_kwargs": {"ground_truth": number}}},
    )


def main(argv: Sequence[str] | None = None) -> None:
    preprocess(argv, make_row, hub=DATA_SOURCE, config="main", save_dir="~/data/gsm8k", about="Convert GSM8K to parquet")


if __name__ == "__main__":
    main()
