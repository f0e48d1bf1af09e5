"""Functions run by the child processes of test_processes.py. Imports little, since every child imports it."""

import os
from collections.abc import Sequence

PART = 1024


def doubled(rows: Sequence[int]) -> list[int]:
    print("words of a library", flush=True)
    return [2 * row for row in rows]


def pids(rows: Sequence[int]) -> list[int]:
    return [os.getpid()] * len(rows)


def picky(rows: Sequence[int]) -> list[int]:
    if bad := [row for row in rows if row % PART == 7]:
        raise ValueError(f"row {bad[0]}")
    return list(rows)


def dies(rows: Sequence[int]) -> list[int]:
    os._exit(9)
