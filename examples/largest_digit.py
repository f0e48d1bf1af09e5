"""Custom data set: find the largest digit. Used by docs/how_to/data_set.md.

python examples/largest_digit.py DIRECTORY writes train.parquet and test.parquet there. Prompt ``502913=``, response ``9``.
"""

import random
import sys

from data_preprocess.writer import rl_row, write


def rows(split: str, numbers: list[str]) -> list[dict[str, object]]:
    return [
        rl_row(
            data_source="largest_digit",  # unknown to the built-in scorers: set reward.scorer
            prompt=f"{number}=",
            ability="compare",
            ground_truth=max(number),
            split=split,
            index=index,
        )
        for index, number in enumerate(numbers)
    ]


def main(directory: str) -> None:
    numbers = [f"{number:06d}" for number in random.Random(0).sample(range(10**6), 4128)]  # without duplicates
    write(rows("train", numbers[:4096]), directory, "train")
    write(rows("test", numbers[4096:]), directory, "test")


if __name__ == "__main__":
    main(sys.argv[1])
