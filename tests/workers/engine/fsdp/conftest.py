"""Results of two and of four ranks: one set of processes for all tests with that number."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import save_tiny_model
from tests.turns import made_once, shared_folder
from tests.workers.engine.forks import fork_ranks
from tests.workers.engine.fsdp.cases import exported, train
from tests.workers.engine.fsdp.four_ranks import main as four_ranks_main
from tests.workers.engine.fsdp.two_ranks import main as two_ranks_main
from tests.workers.engine.toy import one_rank, toy_engine

Found = dict[str, Any]


@pytest.fixture(scope="session")
def models(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two more. The window's second layer sees four tokens, and it has one head of keys and values."""
    layers = {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True, "sliding_window": 4}
    folder = tmp_path_factory.mktemp("models")
    return models | {
        "window": save_tiny_model(folder / "window", "qwen2", num_key_value_heads=1, max_window_layers=1, **layers),
        "experts": save_tiny_model(folder / "experts", "qwen3_moe"),
    }


@pytest.fixture(scope="session")
def two_ranks(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Found]]:
    """(Their directory, what each rank found by name.) The first to ask has it made, also for the other test processes."""
    path = made_once(shared_folder(tmp_path_factory) / "two_ranks", partial(find_out, models))
    return path, [torch.load(path / f"rank_{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.fixture(scope="session")
def four_ranks(two_ranks: tuple[Path, list[Found]], models: dict[str, str]) -> tuple[Path, list[Found]]:
    """The same of four, in the same directory."""
    path, _ = two_ranks

    def find_out_in_four(done: Path) -> None:
        fork_ranks(four_ranks_main, (str(path), models), nprocs=4)

    made_once(path / "four_ranks", find_out_in_four)
    return path, [torch.load(path / f"four_{rank}.pt", weights_only=True) for rank in range(4)]


def find_out(models: dict[str, str], path: Path) -> None:
    with one_rank(path):
        engine = toy_engine(models["qwen2"])
        train(engine, range(2))
        engine.save(str(path / "one_rank"))
        saved = exported(engine)
        torch.save({"saved": saved, "grad_norm_on_one": train(engine, range(2, 4))["grad_norm"]}, path / "one_rank.pt")
    fork_ranks(two_ranks_main, (str(path), models), nprocs=2)
