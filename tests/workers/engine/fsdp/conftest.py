"""What two ranks found out: one pair of processes for all tests that need two."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing

from tests.turns import made_once, shared_folder
from tests.workers.engine.fsdp.cases import exported, train
from tests.workers.engine.fsdp.two_ranks import main
from tests.workers.engine.toy import one_rank, toy_engine

Found = dict[str, Any]


@pytest.fixture(scope="session")
def two_ranks(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Found]]:
    """(Their directory, what each rank found by name.) The first to ask has it made, also for the other test processes."""
    path = made_once(shared_folder(tmp_path_factory) / "two_ranks", partial(find_out, models))
    return path, [torch.load(path / f"rank_{rank}.pt", weights_only=True) for rank in range(2)]


def find_out(models: dict[str, str], path: Path) -> None:
    with one_rank(path):
        engine = toy_engine(models["qwen2"])
        train(engine, range(2))
        engine.save(str(path / "one_rank"))
        saved = exported(engine)
        torch.save({"saved": saved, "grad_norm_on_one": train(engine, range(2, 4))["grad_norm"]}, path / "one_rank.pt")
    torch.multiprocessing.spawn(main, args=(str(path), models), nprocs=2)
