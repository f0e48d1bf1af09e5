"""Ranks as forks of one new process: what they import is imported once."""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
import torch.multiprocessing


def fork_ranks(main: Callable[..., None], args: tuple[Any, ...], nprocs: int, modules: Sequence[str] = ()) -> None:
    """Run main(rank, *args) in each of ``nprocs`` processes. modules: imported before they fork."""
    torch.multiprocessing.spawn(_fork, args=(main, args, nprocs, modules), nprocs=1)


def _fork(_: int, main: Callable[..., None], args: tuple[Any, ...], nprocs: int, modules: Sequence[str]) -> None:
    torch.set_num_threads(1)
    for module in modules:
        import_module(module)
    torch.multiprocessing.start_processes(main, args=args, nprocs=nprocs, start_method="fork")
