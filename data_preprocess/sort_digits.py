"""The quick start's task: write the digits in order. Prompt ``502913=``, answer ``012359``.

python -m data_preprocess.sort_digits --local_save_dir DIR writes train.parquet and test.parquet for RL, and sft.parquet, worked
examples for the warm start. No two rows of the three files show the same digits in the same order.
"""

import argparse
from collections.abc import Sequence

from data_preprocess.writer import rl_row, sft_row, write
from trainer.data.order import permutation
from workers.seeding import seed_of

DATA_SOURCE = "sort_digits"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Sort digits: a task that a tiny model learns in minutes")
    parser.add_argument("--local_save_dir", "--local_dir", default="~/data/sort_digits", help="(default: %(default)s)")
    parser.add_argument("--digits", type=int, default=6, help="digits of a problem (default: %(default)s)")
    parser.add_argument("--train_size", type=int, default=20000, help="problems for RL (default: %(default)s)")
    parser.add_argument("--test_size", type=int, default=512, help="held-out problems (default: %(default)s)")
    parser.add_argument("--sft_size", type=int, default=8192, help="worked examples for the warm start (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="chooses the problems (default: %(default)s)")
    args = parser.parse_args(argv)
    wanted, there = args.test_size + args.train_size + args.sft_size, 10**args.digits
    if wanted > there:
        sizes = f"{args.test_size} + {args.train_size} + {args.sft_size} = {wanted}"
        parser.error(f"{sizes} problems are wanted, {args.digits} digits make only {there}")

    # The test problems come first: they stay the same when the other sizes change.
    problems = [f"{number:0{args.digits}d}" for number in permutation(there, seed_of(args.seed, "sort_digits"))[:wanted]]
    test, rest = problems[: args.test_size], problems[args.test_size :]
    train, sft = rest[: args.train_size], rest[args.train_size :]
    for split, digits in (("train", train), ("test", test)):
        rows = [
            rl_row(data_source=DATA_SOURCE, prompt=f"{d}=", ability="sort", ground_truth=_sorted(d), split=split, index=i)
            for i, d in enumerate(digits)
        ]
        write(rows, args.local_save_dir, split)
    if sft:
        write([sft_row(f"{d}=", _sorted(d)) for d in sft], args.local_save_dir, "sft")


def _sorted(digits: str) -> str:
    return "".join(sorted(digits))


if __name__ == "__main__":
    main()
