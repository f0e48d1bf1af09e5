"""Checkpoints of synthetic models, written by the real Saver."""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from configs.schema.common import CheckpointConfig
from trainer.checkpoint.saver import Saver
from trainer.cluster.remote import RemoteModel, SaveFailed
from trainer.run.events import Events
from workers.engine.base import Saved
from workers.engine.saving import declare_written, in_background, saved_files

CONFIG: dict[str, Any] = {
    "data": {"train_files": ["a.parquet"], "train_batch_size": 32},
    "actor_rollout_ref": {
        "actor": {"optim": {"lr": 1e-6, "betas": [0.9, 0.999]}, "ppo_micro_batch_size_per_gpu": 8},
        "rollout": {"val_kwargs": {"n": 1}},
    },
    "trainer": {"total_epochs": 1, "save_freq": 5, "hf_token": "s3cret"},
    "ray_kwargs": {"ray_init": {}},
}
ROLES = ("actor", "critic")


class Tokenizer:
    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "tokenizer.json").write_text("{}")
        (Path(folder) / "templates").mkdir()
        (Path(folder) / "templates/chat.jinja").write_text("{{ messages }}")


class Model:
    """Text files of two ranks. problem: the error that ends the next save. gate: an event it waits for. seconds,
    waited_for: see Saved. pool: its workers' name. meets: a save waits there for the others."""

    def __init__(
        self,
        role: str,
        step: int,
        problem: OSError | None = None,
        gate: Future[None] | None = None,
        seconds: float = 1.0,
        waited_for: str | None = None,
        pool: str = "workers",
        meets: threading.Barrier | None = None,
    ) -> None:
        self.group = SimpleNamespace(name=pool)
        self.meets = meets
        self.role = role
        self.step = step
        self.problem = problem
        self.gate = gate
        self.seconds = seconds
        self.waited_for = waited_for
        self.writing: Future[Saved] | None = None

    def save(self, path: str, *, background: bool = False) -> None:
        if self.meets is not None:
            self.meets.wait()
        self.writing = in_background(partial(self._write, Path(path), background))
        if not background:
            wait([self.writing])

    def _write(self, folder: Path, background: bool) -> Saved:
        if self.gate is not None:
            self.gate.result()
        if self.problem is not None:
            raise self.problem
        for rank in range(2):
            (folder / f"shard-{rank}.safetensors").write_text(content(self.role, rank, self.step))
        files = saved_files(folder, [f"shard-{rank}.safetensors" for rank in range(2)])
        if background:
            for rank, file in enumerate(files, 1):
                declare_written(folder, f"shard-{rank:05d}-of-00002", [file])
        return Saved(files=files, seconds=self.seconds, waited_for=self.waited_for)

    def saved(self, *, patient: bool = True) -> Saved | None:
        assert self.writing is not None
        if patient:
            wait([self.writing])
        if not self.writing.done():
            return None
        try:
            return self.writing.result()
        except OSError as error:
            raise SaveFailed(str(error)) from error


def content(role: str, rank: int, step: int) -> str:
    return f"{role} {rank} of step {step}"


def models(step: int, roles: Sequence[str] = ROLES, **how: Any) -> dict[str, RemoteModel]:
    return {role: cast(RemoteModel, Model(role, step, **how)) for role in roles}


def wait_for_threads(written: Mapping[str, RemoteModel]) -> None:
    """Simulate the rest of a kill: in these tests the threads outlive the killed save."""
    wait([model.writing for model in cast(Mapping[str, Model], written).values() if model.writing is not None])


def saver(
    run_dir: Path,
    *,
    best_metric: str | None = None,
    async_save: bool = False,
    remote_dir: str | None = None,
    copies: int | None = None,
    **keep: int | None,
) -> Saver:
    """A Saver in an existing run directory."""
    run_dir.mkdir(parents=True, exist_ok=True)
    return Saver(
        run_dir,
        Events(run_dir),
        config=CONFIG,
        world_size=2,
        keep=keep,
        options=CheckpointConfig(async_save=async_save, remote_dir=remote_dir, max_remote_ckpt_to_keep=copies),
        best_metric=best_metric,
        tokenizer=cast(Any, Tokenizer()),
    )


def save(
    run_dir: Path,
    *steps: int,
    roles: Sequence[str] = ROLES,
    arrays: Mapping[str, Mapping[str, Tensor]] | None = None,
    **keep: int | None,
) -> None:
    """Save a checkpoint after each of ``steps``."""
    for step in steps:
        saver(run_dir, **keep).save(step, models(step, roles), {"kl": {"coefficient": 0.1}}, {}, arrays=arrays)


def responses(step: int) -> dict[str, dict[str, Tensor]]:
    """Arrays of a controller with one component: columns that share memory, one that is not contiguous, and empty ones."""
    tokens = torch.arange(6) + step
    return {
        "groups": {
            "ids": tokens,
            "same": tokens,
            "tail": tokens[2:],
            "columns": tokens.view(2, 3).T,
            "log_probs": torch.tensor([-0.5, -1.5], dtype=torch.bfloat16),
            "finished": torch.tensor(True),
            "none": torch.zeros(0, 3),
        }
    }


def equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor) for name, tensor in expected.items()
    )


def is_complete(path: Path, step: int) -> bool:
    files = [(path / role / f"shard-{rank}.safetensors", content(role, rank, step)) for role in ROLES for rank in range(2)]
    return all(file.read_text() == text for file, text in files)


def names(path: Path) -> set[str]:
    return {child.name for child in path.iterdir()}
