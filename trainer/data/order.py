"""Order of the data: the rows of each step as a pure function of seed and step.

Problem: a resumed run must see exactly the rows that the interrupted one would have seen, also on another machine or with another
version of NumPy. Idea: no sampler state at all. The permutation of an epoch is computed from (seed, purpose, epoch) with a
random stream whose values are specified, and step s reads its slice of it. Cost: one sort of n 64-bit numbers per epoch.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from workers.seeding import seed_of


@lru_cache(maxsize=2)
def permutation(n: int, seed: int) -> np.ndarray:
    """Permutation of 0 .. n - 1, uniform over seeds: int64 (n,), read-only."""
    # Sort by PCG64's raw output: NumPy guarantees the bit stream of a BitGenerator across versions, but not the algorithms of
    # Generator.shuffle and permutation. The array is cached and shared, hence read-only.
    order = np.random.PCG64(seed).random_raw(n).argsort(kind="stable")
    order.flags.writeable = False
    return order


def draw(n: int, max_samples: int, seed: int, shuffle: bool) -> list[int]:
    """Indices of the rows that are used, ascending: max_samples of n, sampled if shuffle, else the first; all for -1."""
    # Ascending: which rows are used and in which order they come are separate decisions; DataOrder takes the second.
    if not 0 <= max_samples < n:
        return list(range(n))
    return sorted(permutation(n, seed_of(seed, "max_samples"))[:max_samples].tolist()) if shuffle else list(range(max_samples))


@dataclass(frozen=True, slots=True)
class DataOrder:
    """Batches of batch_size out of n rows, with a new order each epoch if shuffle. The incomplete last batch is dropped."""

    n: int
    batch_size: int
    seed: int
    shuffle: bool

    def __post_init__(self) -> None:
        if self.batch_size > self.n:
            raise ValueError(f"a batch of {self.batch_size} rows cannot be filled: the data has {self.n}; reduce the batch size")

    @property
    def steps_per_epoch(self) -> int:
        return self.n // self.batch_size

    @property
    def notice(self) -> str | None:
        """One line about the rows that each epoch drops; None if it drops none."""
        dropped = self.n % self.batch_size
        if not dropped:
            return None
        which = "different rows each epoch" if self.shuffle else "always the last ones"
        return f"{dropped} of {self.n} rows do not fill a batch of {self.batch_size} and are left out of each epoch ({which})"

    def batch(self, step: int) -> list[int]:
        """Row indices of global step 0, 1, ...: batch_size distinct ones."""
        epoch, place = divmod(step, self.steps_per_epoch)
        rows = slice(place * self.batch_size, (place + 1) * self.batch_size)
        if not self.shuffle:
            return list(range(rows.start, rows.stop))
        return permutation(self.n, seed_of(self.seed, "data_order", epoch))[rows].tolist()
