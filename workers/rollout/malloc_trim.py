"""Host memory: control when glibc returns freed memory to the operating system."""

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # parameter numbers of mallopt(3), from malloc.h
KEPT_BYTES = 1 << 30


def trim_free_memory() -> None:
    """Return the freed memory that glibc caches to the operating system."""
    ctypes.CDLL(None).malloc_trim(0)


def keep_freed_memory() -> None:
    """Let glibc cache up to KEPT_BYTES of freed memory in this process.

    Pages from the operating system are zeroed on first touch, which is expensive: with a sleep that released memory each time,
    it took a quarter of a small model's step; with large tensors as mappings of their own, a tenth of an update at 84M
    parameters. trim_free_memory still releases everything. Does nothing if a MALLOC_* environment variable is set: the
    user's setting of glibc has priority.
    """
    if any(name.startswith("MALLOC_") for name in os.environ):
        return
    libc = ctypes.CDLL(None)
    # M_MMAP_MAX=0: large blocks come from the heap too. A block with a mapping of its own is unmapped as soon as it is freed,
    # and would never be cached.
    taken = libc.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES), libc.mallopt(M_MMAP_MAX, 0)
    assert all(taken), "mallopt: refused"
