"""Random state that vLLM shares with its process, and where a request's own draws start."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

KEY = "tandem_key"  # among a request's extra_args: where its draws start


@contextmanager
def fenced() -> Iterator[None]:
    """vLLM seeds and draws from the global generators, and on CPU replaces torch.set_num_threads: the trainer sees none of it."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    python, numpy = random.getstate(), np.random.get_state()
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_num_threads = set_threads
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
