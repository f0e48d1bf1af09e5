"""Ranks as forks of one new process: what they import is imported once."""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
import torch.multiprocessing


def fork_ranks(main: Callable[..., None], args: tuple[Any, ...], nprocs: int, modules: Sequence[str] = ()) -> None:
    """Run main(rank, *args) in each of ``nprocs`` processes. modules: imported before they fork."""
    fork_runs(main, [(args, nprocs)], modules)


def fork_runs(main: Callable[..., None], runs: Sequence[tuple[tuple[Any, ...], int]], modules: Sequence[str] = ()) -> None:
    """The same for each (args, nprocs), one after the other: the modules are imported once for all."""
    torch.multiprocessing.spawn(_fork, args=(main, runs, modules), nprocs=1)


def _fork(_: int, main: Callable[..., None], runs: Sequence[tuple[tuple[Any, ...], int]], modules: Sequence[str]) -> None:
    torch.set_num_threads(1)
    for module in modules:
        import_module(module)
    for args, nprocs in runs:
        torch.multiprocessing.start_processes(main, args=args, nprocs=nprocs, start_method="fork")
