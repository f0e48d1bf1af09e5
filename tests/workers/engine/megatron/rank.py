"""Runs in each of several processes: everything that needs so many ranks, once. The tests look at what is written here."""

from pathlib import Path
from typing import Any

import torch

from tests.workers.engine.megatron.cases import ranks, trained, trained_critic

Changes = dict[str, Any]

TRAINED: dict[int, dict[str, tuple[str, Changes]]] = {
    1: {"one": ("qwen2", {})},
    2: {
        "tp2": ("qwen2", {"tp": 2}),
        "tp2 sp recomputed": ("qwen2", {"tp": 2, "sequence_parallel": True, "recompute": True}),
        "tp2 qwen3": ("qwen3", {"tp": 2, "sequence_parallel": True}),
        "pp2": ("qwen2", {"pp": 2}),
        "pp2 tied": ("tied", {"pp": 2}),
        "pp2 llama": ("llama", {"pp": 2, "recompute": True}),
        "dp2": ("qwen2", {}),
        "dp2 distributed": ("qwen2", {"use_distributed_optimizer": True}),
        "cp2": ("qwen2", {"cp": 2}),
    },
    4: {
        "tp2 pp2 sp": ("tied", {"tp": 2, "pp": 2, "sequence_parallel": True, "use_distributed_optimizer": True}),
    },
}
CRITICS: dict[int, dict[str, Changes]] = {
    2: {"tp2 sp": {"tp": 2, "sequence_parallel": True}, "pp2": {"pp": 2}, "cp2": {"cp": 2, "use_distributed_optimizer": True}},
}


def main(rank: int, size: int, directory: str, models: dict[str, str], soak: bool) -> None:
    torch.set_num_threads(1)
    path = Path(directory)
    found: dict[str, Any] = {}
    for name, (model, changes) in TRAINED[size].items():
        with ranks(path, name, rank, size):
            found[name] = trained(models[model], **changes)
    for name, changes in CRITICS.get(size, {}).items():
        with ranks(path, f"critic {name}", rank, size):
            found[f"critic {name}"] = trained_critic(models["qwen2"], **changes)
    torch.save(found, path / f"{size}_{rank}.pt")
