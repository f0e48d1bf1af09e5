"""Isolation of the process's random state from vLLM, and the key of a request's random stream."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

# In a request's extra_args: its random stream (sampling.stream_keys), and the number of response tokens that vLLM has as prompt.
KEY, BEGUN = "tandem_key", "tandem_begun"


@contextmanager
def fenced() -> Iterator[None]:
    """Restore global random state and thread settings on exit.

    vLLM seeds and uses the global generators, and replaces torch.set_num_threads on CPU. Without this context the trainer, in the
    same process, would depend on what the engine does.
    """
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    python, numpy = random.getstate(), np.random.get_state()
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        # Restore the function before calling it: vLLM's replacement is still installed.
        torch.set_num_threads = set_threads
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
