"""What ranks found out: one set of processes for all tests that need so many."""

from collections.abc import Callable
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
def ranks_of(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[Found]]:
    """Of how many ranks there are: what each found, by name."""
    path, found = tmp_path_factory.mktemp("megatron_ranks"), {}

    def of(size: int) -> list[Found]:
        if size not in found:
            torch.multiprocessing.spawn(main, args=(size, str(path), models, False), nprocs=size)
            found[size] = [torch.load(path / f"{size}_{rank}.pt", weights_only=True) for rank in range(size)]
        return found[size]

    return of
