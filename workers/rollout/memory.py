"""Memory of the host: what the C library (glibc) does with what was freed."""

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 1 << 30
LARGEST_IN_HEAP = 32 << 20  # more it does not take


def give_back_free_memory() -> None:
    """The C library keeps freed memory for later: the system gets it back."""
    ctypes.CDLL(None).malloc_trim(0)


def keep_freed_memory() -> None:
    """Keep up to KEPT_BYTES of it for the next step, instead of asking the system for pages anew, which come empty: with a sleep
    that gave it back each time, a quarter of a small model's step went into that. give_back_free_memory gives it back all the
    same. Whoever has set one of the library's own variables (MALLOC_..._THRESHOLD_) is left with that.
    """
    if any(name.startswith("MALLOC_") and name.endswith("_THRESHOLD_") for name in os.environ):
        return
    libc = ctypes.CDLL(None)
    taken = libc.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES), libc.mallopt(M_MMAP_THRESHOLD, LARGEST_IN_HEAP)
    assert all(taken), "mallopt: refused"
