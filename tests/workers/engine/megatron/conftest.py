"""Results of ranks: one set of processes for all tests with that number."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.turns import made_once, shared_folder
from tests.workers.engine.forks import fork_runs
from tests.workers.engine.megatron.cases import save_models
from tests.workers.engine.megatron.rank import SIZES, main

Found = dict[str, Any]
MODULES = ["workers.engine.megatron.megatron_engine", "workers.engine.fsdp.fsdp_engine"]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories."""
    return save_models(tmp_path_factory.mktemp("megatron_models"))


@pytest.fixture(scope="session")
def path(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with the files of all ranks. They are processes of their own: Megatron's shim changes torch."""
    if torch.cuda.is_available():
        pytest.skip("Megatron takes the GPUs: test_engine_cuda.py")

    def find_out(path: Path) -> None:
        fork_runs(main, [((size, str(path), models), size) for size in SIZES], MODULES)

    return made_once(shared_folder(tmp_path_factory) / "megatron_ranks", find_out)


@pytest.fixture(scope="session")
def ranks_of(path: Path) -> Callable[[int], list[Found]]:
    """Of how many ranks there are: what each found, by name."""

    @cache
    def of(size: int) -> list[Found]:
        return [torch.load(path / f"{size}_{rank}.pt", weights_only=True) for rank in range(size)]

    return of
