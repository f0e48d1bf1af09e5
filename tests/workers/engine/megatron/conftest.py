"""Results of ranks: one set of processes for all tests with that number."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.turns import made_once, shared_folder
from tests.workers.engine.forks import fork_ranks
from tests.workers.engine.megatron.cases import save_models
from tests.workers.engine.megatron.rank import main

Found = dict[str, Any]
MODULES = ["workers.engine.megatron.megatron_engine", "workers.engine.fsdp.fsdp_engine"]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories."""
    return save_models(tmp_path_factory.mktemp("megatron_models"))


@pytest.fixture(scope="session")
def path_of(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Directory with the files of that number of ranks. They are processes of their own: Megatron's shim changes torch."""

    def of(size: int) -> Path:
        if torch.cuda.is_available():
            pytest.skip("Megatron takes the GPUs: test_engine_cuda.py")
        folder = shared_folder(tmp_path_factory) / f"megatron_ranks_{size}"
        return made_once(folder, lambda path: fork_ranks(main, (size, str(path), models), size, MODULES))

    return of


@pytest.fixture(scope="session")
def ranks_of(path_of: Callable[[int], Path]) -> Callable[[int], list[Found]]:
    """Of how many ranks there are: what each found, by name."""

    @cache
    def of(size: int) -> list[Found]:
        return [torch.load(path_of(size) / f"{size}_{rank}.pt", weights_only=True) for rank in range(size)]

    return of
