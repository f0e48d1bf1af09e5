"""Memory of the host: what the C library (glibc) does with what was freed."""

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
KEPT_BYTES = 1 << 30


def give_back_free_memory() -> None:
    """The C library keeps freed memory for later: the system gets it back."""
    ctypes.CDLL(None).malloc_trim(0)


def keep_freed_memory() -> None:
    """Keep up to KEPT_BYTES of it, above what is in use, instead of asking the system for pages anew, which come empty: with a
    sleep that gave it back each time, a quarter of a small model's step went into that, and where large tensors were mappings of
    their own, a tenth of an update at 84M parameters. give_back_free_memory gives it back all the same. Whoever has set one of
    the library's own variables (MALLOC_..._) is left with that.
    """
    if any(name.startswith("MALLOC_") for name in os.environ):
        return
    libc = ctypes.CDLL(None)
    taken = libc.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES), libc.mallopt(M_MMAP_MAX, 0)
    assert all(taken), "mallopt: refused"
