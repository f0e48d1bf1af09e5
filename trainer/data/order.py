"""Which rows a step sees: a function of the seed and the step, so that a resumed run needs no state to go on."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from workers.seeding import seed_of


@lru_cache(maxsize=2)
def permutation(n: int, seed: int) -> np.ndarray:
    """0 .. n - 1 in an order that is uniform over seeds: int64 (n,), read-only.

    Rows are sorted by PCG64's raw stream, which NumPy keeps the same across versions; it does not promise that of shuffle().
    """
    order = np.random.PCG64(seed).random_raw(n).argsort(kind="stable")
    order.flags.writeable = False
    return order


def draw(n: int, max_samples: int, seed: int, shuffle: bool) -> list[int]:
    """Which of n rows are used, ascending: max_samples of them, drawn if shuffle, else the first; all for -1."""
    if not 0 <= max_samples < n:
        return list(range(n))
    return sorted(permutation(n, seed_of(seed, "max_samples"))[:max_samples].tolist()) if shuffle else list(range(max_samples))


@dataclass(frozen=True, slots=True)
class DataOrder:
    """n rows in batches of batch_size; a new order each epoch if shuffle. An incomplete last batch is left out."""

    n: int
    batch_size: int
    seed: int
    shuffle: bool

    def __post_init__(self) -> None:
        if self.batch_size > self.n:
            raise ValueError(f"a batch of {self.batch_size} rows cannot be filled: the data has {self.n}; lower the batch size")

    @property
    def steps_per_epoch(self) -> int:
        return self.n // self.batch_size

    @property
    def notice(self) -> str | None:
        """What is left out, in one line, if anything is."""
        left_out = self.n % self.batch_size
        if not left_out:
            return None
        which = "other ones each epoch" if self.shuffle else "always the last ones"
        return f"{left_out} of {self.n} rows do not fill a batch of {self.batch_size} and are left out of each epoch ({which})"

    def batch(self, step: int) -> list[int]:
        """The rows of global step 0, 1, ...: batch_size distinct ones."""
        epoch, place = divmod(step, self.steps_per_epoch)
        rows = slice(place * self.batch_size, (place + 1) * self.batch_size)
        if not self.shuffle:
            return list(range(rows.start, rows.stop))
        return permutation(self.n, seed_of(self.seed, "data_order", epoch))[rows].tolist()
