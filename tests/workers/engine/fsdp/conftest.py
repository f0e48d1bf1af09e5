"""What two ranks found out: one pair of processes for all tests that need two."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing

from tests.workers.engine.fsdp.two_ranks import main
from tests.workers.engine.toy import one_rank, toy_engine

Found = dict[str, Any]


@pytest.fixture(scope="session")
def two_ranks(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Found]]:
    """(Their directory, what each rank found by name.)"""
    path = tmp_path_factory.mktemp("two_ranks")
    torch.multiprocessing.spawn(main, args=(str(path), models), nprocs=2)
    return path, [torch.load(path / f"rank_{rank}.pt", weights_only=True) for rank in range(2)]
