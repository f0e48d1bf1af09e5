"""Generate the data of the quick start: sort the digits. Prompt ``502913=``, response ``012359``.

python -m data_preprocess.sort_digits --local_save_dir DIR writes train.parquet and test.parquet for RL, sft.parquet (worked
examples for the warm start), and preferences.parquet and preferences_test.parquet (correct and wrong responses for a reward
model or DPO). No problem occurs twice in these files.
"""

import argparse
from collections.abc import Sequence
from itertools import islice

import numpy as np

from data_preprocess.writer import preference_row, rl_row, sft_row, write
from trainer.data.order import permutation
from workers.seeding import seed_of

DATA_SOURCE = "sort_digits"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Generate the task of sorting digits, which a tiny model learns in minutes")
    parser.add_argument("--local_save_dir", "--local_dir", default="~/data/sort_digits", help="(default: %(default)s)")
    parser.add_argument("--digits", type=int, default=6, help="digits per problem (default: %(default)s)")
    parser.add_argument("--train_size", type=int, default=20000, help="problems for RL (default: %(default)s)")
    parser.add_argument("--test_size", type=int, default=512, help="held-out problems (default: %(default)s)")
    parser.add_argument("--sft_size", type=int, default=8192, help="worked examples for the warm start (default: %(default)s)")
    parser.add_argument(
        "--preferences_size", type=int, default=8192, help="pairs for a reward model or DPO (default: %(default)s)"
    )
    parser.add_argument("--preferences_test_size", type=int, default=512, help="held-out pairs (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed that selects the problems (default: %(default)s)")
    args = parser.parse_args(argv)
    # One permutation of all problems is cut into the files, so that they cannot overlap. The test problems come first: they stay
    # the same when the other sizes change.
    sizes = (args.test_size, args.train_size, args.sft_size, args.preferences_test_size, args.preferences_size)
    wanted, there = sum(sizes), 10**args.digits
    if wanted > there:
        total = f"{' + '.join(map(str, sizes))} = {wanted}"
        parser.error(f"{total} problems are requested, but {args.digits} digits give only {there}; raise --digits")

    problems = iter(f"{number:0{args.digits}d}" for number in permutation(there, seed_of(args.seed, "sort_digits"))[:wanted])
    test, train, sft, held_out, compared = ([*islice(problems, size)] for size in sizes)
    for split, digits in (("train", train), ("test", test)):
        rows = [
            rl_row(data_source=DATA_SOURCE, prompt=f"{d}=", ability="sort", ground_truth=_sorted(d), split=split, index=i)
            for i, d in enumerate(digits)
        ]
        write(rows, args.local_save_dir, split)
    if sft:
        write([sft_row(f"{d}=", _sorted(d)) for d in sft], args.local_save_dir, "sft")
    for split, digits in (("preferences", compared), ("preferences_test", held_out)):
        pairs = [preference_row(f"{d}=", _sorted(d), _spoilt(_sorted(d), seed_of(args.seed, "spoilt", d))) for d in digits]
        if pairs:
            write(pairs, args.local_save_dir, split)


def _spoilt(answer: str, seed: int) -> str:
    """The answer with a typical mistake of a model: two digits swapped, a digit replaced, added or missing."""
    kind, at, other, digit = (int(word) for word in np.random.PCG64(seed).random_raw(4) >> 32)
    at %= len(answer)
    apart = [i for i in range(len(answer)) if answer[i] != answer[at]]
    if kind % 4 == 0 and apart:
        swapped = list(answer)
        swapped[at], swapped[apart[other % len(apart)]] = answer[apart[other % len(apart)]], answer[at]
        return "".join(swapped)
    if kind % 4 == 1:
        return answer[:at] + answer[at + 1 :]
    another = str((int(answer[at]) + 1 + digit % 9) % 10)
    return answer[:at] + another + answer[at + (kind % 4 != 2) :]


def _sorted(digits: str) -> str:
    return "".join(sorted(digits))


if __name__ == "__main__":
    main()
