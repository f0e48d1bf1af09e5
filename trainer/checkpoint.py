"""Checkpoints from the controller's side: a directory that is whole or absent.

    <run_dir>/global_step_N/{actor,critic}/...  manifest.json        latest_checkpointed_iteration.txt

All is written under ``global_step_N.incomplete``, brought to disk, and renamed: the rename is the moment at which the
checkpoint exists. Then the small file that names the latest one moves, and only then do old ones go. What a killed run
left under an incomplete name is removed when the next one starts.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from trainer.run_dir import LATEST, checkpoint_dir, checkpoint_steps, fsync_directory, redact, write_atomic

MANIFEST = "manifest.json"
INCOMPLETE = ".incomplete"

# Keys that a resumed run may change; a name that ends in a dot stands for all below it. The first block does not reach
# the training, or only says how long it lasts; the second says how the same work is cut and held: equal up to rounding.
SAFE_TO_CHANGE = (
    "trainer.total_epochs", "trainer.total_training_steps", "trainer.logger", "trainer.project_name", "trainer.experiment_name",
    "trainer.default_local_dir", "trainer.log_val_generations", "trainer.rollout_data_dir", "trainer.test_freq",
    "trainer.save_freq", "trainer.val_before_train", "trainer.val_only", "trainer.max_actor_ckpt_to_keep",
    "trainer.max_critic_ckpt_to_keep", "trainer.max_ckpt_to_keep", "trainer.export_dir", "trainer.resume_mode",
    "trainer.resume_from_path", "trainer.dry_run", "trainer.full_traceback", "data.val_files", "data.val_max_samples",
    "data.val_batch_size", "data.filter_overlong_prompts_workers", "reward.num_workers",
    "actor_rollout_ref.rollout.val_kwargs.", "actor_rollout_ref.rollout.timeouts.",
    "algorithm.rollout_correction.mismatch_bound", "ray_kwargs.",

    "trainer.backend", "trainer.nnodes", "trainer.n_gpus_per_node", "*.use_dynamic_bsz", "*.log_prob_use_dynamic_bsz",
    "*.ppo_micro_batch_size", "*.ppo_micro_batch_size_per_gpu", "*.ppo_max_token_len_per_gpu", "*.log_prob_micro_batch_size",
    "*.log_prob_micro_batch_size_per_gpu", "*.log_prob_max_token_len_per_gpu", "*.forward_micro_batch_size",
    "*.forward_micro_batch_size_per_gpu", "*.forward_max_token_len_per_gpu",
    "data.micro_batch_size_per_gpu", "data.max_token_len_per_gpu", "*.enable_gradient_checkpointing",
    "*.reshard_after_forward", "*.param_offload", "*.optimizer_offload", "actor_rollout_ref.rollout.max_num_seqs",
    "actor_rollout_ref.rollout.gpu_memory_utilization", "actor_rollout_ref.rollout.free_cache_engine",
    "actor_rollout_ref.rollout.update_weights_bucket_megabytes", "actor_rollout_ref.rollout.verify_weights",
    "trainer.deterministic",
)  # fmt: skip


class Stateful(Protocol):
    """What the controller remembers from step to step, as plain JSON."""

    def state(self) -> dict[str, Any]: ...

    def load(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint says about itself.

    step: global_step, the training steps that are done. roles: its sub-directories when it was written. world_size: ranks
    that wrote it. config: the run's, resolved, without secrets. state: the controller's own, as JSON: KL coefficient, position
    in the data, ...
    """

    step: int
    roles: list[str]
    world_size: int
    config: dict[str, Any]
    state: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    def role(self, name: str) -> Path:
        """The directory that the worker group ``name`` loads from. Raises ValueError if it was saved without."""
        if name not in self.manifest.roles:
            raise ValueError(f"{self.path} was saved without {name}: it holds {', '.join(self.manifest.roles)}")
        return self.path / name


class CheckpointWriter:
    """A checkpoint in the making::

        with CheckpointWriter(run_dir, step, config=..., state=..., world_size=..., keep={"actor": 3, "critic": 1}) as directory:
            actor_group.save(directory / "actor")
            critic_group.save(directory / "critic")

    A clean exit makes it whole and current; an exception leaves the run as if it had never begun. Each sub-directory is a
    role. keep: how many checkpoints of each role stay, this one included; None or no entry: all.
    """

    def __init__(
        self,
        run_dir: Path,
        step: int,
        *,
        config: dict[str, Any],
        state: dict[str, Any],
        world_size: int,
        keep: Mapping[str, int | None],
    ) -> None:
        self.run_dir = run_dir
        self.step = step
        self.config = redact(config)
        self.state = state
        self.world_size = world_size
        self.keep = keep
        self.final = checkpoint_dir(run_dir, step)
        self.partial = self.final.with_name(self.final.name + INCOMPLETE)

    def __enter__(self) -> Path:
        assert not self.final.exists(), f"{self.final} is saved a second time"
        if self.partial.exists():
            shutil.rmtree(self.partial)
        self.partial.mkdir(parents=True)
        return self.partial

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            shutil.rmtree(self.partial, ignore_errors=True)  # a worker may still write into it; the next start removes the rest
            return
        roles = sorted(path.name for path in self.partial.iterdir() if path.is_dir())
        manifest = Manifest(step=self.step, roles=roles, world_size=self.world_size, config=self.config, state=self.state)
        write_atomic(self.partial / MANIFEST, json.dumps(asdict(manifest), indent=1))
        _fsync_tree(self.partial)
        self.partial.rename(self.final)
        fsync_directory(self.run_dir)
        write_atomic(self.run_dir / LATEST, str(self.step))
        for role, keep in self.keep.items():
            if keep is not None:
                _drop_old(self.run_dir, role, keep)


def find_latest(run_dir: Path) -> Checkpoint | None:
    """The checkpoint that latest_checkpointed_iteration.txt names, None if there is no such file.

    The file may be edited to go back to an earlier step. Raises ValueError if it names one that is not there.
    """
    if not (run_dir / LATEST).exists():
        return None
    text = (run_dir / LATEST).read_text().strip()
    present = checkpoint_steps(run_dir)
    if not text.isdigit() or int(text) not in present:
        raise ValueError(
            f"{run_dir / LATEST} names step {text!r}, but the checkpoints there are of steps {present}: "
            "write one of these into the file, or start anew with trainer.resume_mode=disable"
        )
    return _read(checkpoint_dir(run_dir, int(text)))


def resolve_resume(resume_mode: str, resume_from_path: str | None, run_dir: Path) -> Checkpoint | None:
    """What a run in ``run_dir`` goes on from; None: it starts anew. Removes what an interrupted save left in ``run_dir``.

    resume_mode: auto, disable or resume_path. Raises ValueError, with what to do, when the checkpoint cannot be used.
    """
    if run_dir.exists():
        _remove_leftovers(run_dir)
    if resume_mode == "disable":
        return None
    if resume_mode == "auto":
        return find_latest(run_dir)
    assert resume_mode == "resume_path", resume_mode
    if resume_from_path is None:
        raise ValueError("trainer.resume_mode=resume_path needs trainer.resume_from_path=<run directory>/global_step_<N>")
    path = Path(resume_from_path).expanduser()
    if not path.is_dir():
        raise ValueError(f"trainer.resume_from_path={path}: there is no such directory")
    if path.name.endswith(INCOMPLETE):
        raise ValueError(f"trainer.resume_from_path={path}: this checkpoint was never finished; take an earlier one")
    if not (path / MANIFEST).exists():
        inside = [checkpoint_dir(path, step).name for step in checkpoint_steps(path)]
        advice = f"name one of those in it: {', '.join(inside)}" if inside else "a checkpoint is a directory global_step_<N>"
        raise ValueError(f"trainer.resume_from_path={path}: no {MANIFEST} in it; {advice}")
    return _read(path)


def check_config(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """The keys that differ, each as "key: old -> new". Raises ValueError if one of them is not in SAFE_TO_CHANGE.

    saved: ``Checkpoint.manifest.config``; current: the run's, resolved.
    """
    old, new = _leaves(redact(saved)), _leaves(redact(current))
    changed = {
        key: f"{key}: {old.get(key, '(not set)')} -> {new.get(key, '(not set)')}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    }
    refused = [change for key, change in changed.items() if not _is_safe(key)]
    if refused:
        raise ValueError(
            "cannot resume with another configuration: " + "; ".join(refused) + ". Put the old values back, or start anew with "
            "trainer.resume_mode=disable. May change: how long to train, logging, validation, checkpoints, cut of the work."
        )
    return list(changed.values())


def _is_safe(key: str) -> bool:
    return any(
        key == safe or (safe.endswith(".") and key.startswith(safe)) or (safe.startswith("*") and key.endswith(safe[1:]))
        for safe in SAFE_TO_CHANGE
    )


def _leaves(tree: Mapping[str, Any]) -> dict[str, str]:
    """Dotted key to value as JSON. An empty mapping has none."""
    leaves: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            leaves |= {f"{key}.{below}": leaf for below, leaf in _leaves(value).items()}
        else:
            leaves[key] = json.dumps(value)
    return leaves


def _read(path: Path) -> Checkpoint:
    manifest = Manifest(**json.loads((path / MANIFEST).read_text(encoding="utf-8")))
    gone = [role for role in manifest.roles if not (path / role).exists()]
    if gone:
        raise ValueError(
            f"{path} cannot be resumed from: of {', '.join(manifest.roles)} it has lost {', '.join(gone)} "
            "(see trainer.max_actor_ckpt_to_keep and its like); take a later one"
        )
    return Checkpoint(path, manifest)


def _drop_old(run_dir: Path, role: str, keep: int) -> None:
    """Remove ``role`` from all but the ``keep`` newest checkpoints that have it; a checkpoint without roles goes too."""
    holding = [path for step in checkpoint_steps(run_dir) if (path := checkpoint_dir(run_dir, step) / role).exists()]
    for path in holding[:-keep]:
        checkpoint = path.parent
        _remove(path)
        if not any(child.is_dir() for child in checkpoint.iterdir()):
            _remove(checkpoint)


def _remove(path: Path) -> None:
    """Take the name away first: a half-removed directory never looks like a whole one."""
    leaving = path.rename(path.with_name(path.name + INCOMPLETE))
    shutil.rmtree(leaving)


def _remove_leftovers(run_dir: Path) -> None:
    """What was half written or half removed. A checkpoint without roles had lost the last of them, and was about to go."""
    for pattern in ("global_step_*", "global_step_*/*"):
        for path in run_dir.glob(pattern):
            if path.name.endswith(INCOMPLETE) and path.is_dir():
                shutil.rmtree(path)
    for step in checkpoint_steps(run_dir):
        path = checkpoint_dir(run_dir, step)
        if not any(child.is_dir() for child in path.iterdir()):
            shutil.rmtree(path)


def _fsync_tree(root: Path) -> None:
    for directory, _, files in os.walk(root):
        for name in files:
            with open(os.path.join(directory, name), "rb") as file:
                os.fsync(file.fileno())
        fsync_directory(Path(directory))
