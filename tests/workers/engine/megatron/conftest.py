"""What ranks found out: one set of processes for all tests that need so many."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing

from tests.workers.engine.megatron.cases import save_models
from tests.workers.engine.megatron.rank import main

Found = dict[str, Any]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories."""
    return save_models(tmp_path_factory.mktemp("megatron_models"))


@pytest.fixture(scope="session")
def ranks_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the ranks leave files."""
    return tmp_path_factory.mktemp("megatron_ranks")


@pytest.fixture(scope="session")
def ranks_of(models: dict[str, str], ranks_path: Path) -> Callable[[int], list[Found]]:
    """Of how many ranks there are: what each found, by name. They are processes of their own: Megatron's shim changes torch."""
    found: dict[int, list[Found]] = {}

    def of(size: int) -> list[Found]:
        if size not in found:
            torch.multiprocessing.spawn(main, args=(size, str(ranks_path), models), nprocs=size)
            found[size] = [torch.load(ranks_path / f"{size}_{rank}.pt", weights_only=True) for rank in range(size)]
        return found[size]

    return of
