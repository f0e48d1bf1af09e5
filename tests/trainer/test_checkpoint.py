import contextlib
import json
import os
import pathlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainer.checkpoint import (
    SAFE_TO_CHANGE,
    CheckpointWriter,
    _is_safe,
    _remove_leftovers,
    check_config,
    find_latest,
    resolve_resume,
)

ROOT = Path(__file__).parents[2]
CONFIG = {
    "data": {"train_files": ["a.parquet"], "train_batch_size": 32},
    "actor_rollout_ref": {
        "actor": {"optim": {"lr": 1e-6, "betas": [0.9, 0.999]}, "ppo_micro_batch_size_per_gpu": 8},
        "rollout": {"val_kwargs": {"n": 1}},
    },
    "trainer": {"total_epochs": 1, "save_freq": 5, "hf_token": "s3cret"},
    "ray_kwargs": {"ray_init": {}},
}


def save(run_dir: Path, step: int, roles: tuple[str, ...] = ("actor", "critic"), **keep: int | None) -> None:
    writer = CheckpointWriter(run_dir, step, config=CONFIG, state={"kl": {"coefficient": 0.1}}, world_size=2, keep=keep)
    with writer as directory:
        for role in roles:
            (directory / role / "shards").mkdir(parents=True)
            for rank in range(2):
                (directory / role / "shards" / f"rank_{rank}").write_text(f"{role} {rank} of step {step}")


def is_whole(path: Path, step: int) -> bool:
    shards = [(path / role / "shards" / f"rank_{rank}", role, rank) for role in ("actor", "critic") for rank in range(2)]
    return all(file.read_text() == f"{role} {rank} of step {step}" for file, role, rank in shards)


def names(path: Path) -> set[str]:
    return {child.name for child in path.iterdir()}


def resume(run_dir: Path, mode: str = "auto", path: Path | None = None) -> int | None:
    checkpoint = resolve_resume(mode, None if path is None else str(path), run_dir)
    return None if checkpoint is None else checkpoint.step


def test_what_was_saved_is_found(tmp_path: Path) -> None:
    save(tmp_path, 5)
    save(tmp_path, 10)
    checkpoint = find_latest(tmp_path)
    assert checkpoint is not None and checkpoint.path == tmp_path / "global_step_10" and is_whole(checkpoint.path, 10)
    manifest = checkpoint.manifest
    assert (manifest.step, manifest.world_size, manifest.roles) == (10, 2, ["actor", "critic"])
    assert manifest.state == {"kl": {"coefficient": 0.1}}
    assert check_config(manifest.config, CONFIG) == []
    assert checkpoint.role("critic") == checkpoint.path / "critic"
    with pytest.raises(ValueError, match="saved without ref: it holds actor, critic"):
        checkpoint.role("ref")
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "10"
    assert "s3cret" not in (checkpoint.path / "manifest.json").read_text()


class Killed(BaseException):
    """The process is gone: nothing after this runs."""


def kill_at(monkeypatch: pytest.MonkeyPatch, count: int) -> Callable[[], int]:
    """Raise Killed at the ``count``-th call that makes, syncs, renames or removes something. Returns a counter of calls."""
    calls = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == count:
                raise Killed
            return function(*args, **kwargs)

        return call

    for name in ("fsync", "mkdir", "unlink", "rmdir"):
        monkeypatch.setattr(os, name, counted(vars(os)[name]))
    for name in ("rename", "replace"):
        monkeypatch.setattr(pathlib.Path, name, counted(vars(pathlib.Path)[name]))
    return lambda: calls


def test_killed_at_any_point_a_checkpoint_is_whole_or_absent(tmp_path: Path) -> None:
    outcomes = []
    for count in range(1, 200):
        run_dir = tmp_path / str(count)
        save(run_dir, 2)
        with pytest.MonkeyPatch.context() as monkeypatch:
            calls = kill_at(monkeypatch, count)
            with contextlib.suppress(Killed):
                save(run_dir, 4, actor=1, critic=1)
            if calls() < count:
                break
        checkpoint = resolve_resume("auto", None, run_dir)
        assert checkpoint is not None and is_whole(checkpoint.path, checkpoint.step)
        outcomes.append(checkpoint.step)
        assert not [name for name in names(run_dir) if name.endswith(".incomplete")]
        for path in run_dir.glob("global_step_*"):
            assert (path / "manifest.json").exists()
        save(run_dir, 6, actor=1, critic=1)
        assert resume(run_dir) == 6
    assert calls() > 20 and outcomes == sorted(outcomes) and set(outcomes) == {2, 4}


def test_an_error_while_saving_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 2)
    writer = CheckpointWriter(tmp_path, 4, config=CONFIG, state={}, world_size=1, keep={"actor": 1})
    with pytest.raises(OSError, match="disk full"), writer as directory:
        (directory / "actor").mkdir()
        raise OSError("disk full")
    assert names(tmp_path) == {"global_step_2", "latest_checkpointed_iteration.txt"}
    assert resume(tmp_path) == 2


def test_old_checkpoints_go_only_after_the_new_one_is_whole(tmp_path: Path) -> None:
    save(tmp_path, 2)
    writer = CheckpointWriter(tmp_path, 4, config=CONFIG, state={}, world_size=1, keep={"actor": 1})
    with writer as directory:
        (directory / "actor").mkdir()
        assert is_whole(tmp_path / "global_step_2", 2) and resume_text(tmp_path) == "2"
    assert names(tmp_path / "global_step_2") == {"critic", "manifest.json"}


def resume_text(run_dir: Path) -> str:
    return (run_dir / "latest_checkpointed_iteration.txt").read_text()


def test_each_role_keeps_its_own_number(tmp_path: Path) -> None:
    for step in (1, 2, 3, 9, 10):
        save(tmp_path, step, actor=3, critic=1)
    assert names(tmp_path) - {"latest_checkpointed_iteration.txt"} == {"global_step_3", "global_step_9", "global_step_10"}
    assert names(tmp_path / "global_step_9") == {"actor", "manifest.json"}
    with pytest.raises(ValueError, match=r"global_step_9 cannot be resumed from: of actor, critic it has lost critic"):
        resume(tmp_path, "resume_path", tmp_path / "global_step_9")
    assert resume(tmp_path) == 10


def test_without_a_limit_all_are_kept(tmp_path: Path) -> None:
    for step in range(1, 5):
        save(tmp_path, step, actor=None)
    assert len(list(tmp_path.glob("global_step_*/critic"))) == 4


def test_how_a_run_starts(tmp_path: Path) -> None:
    assert resume(tmp_path / "none_yet") is None
    save(tmp_path, 3)
    save(tmp_path, 7)
    assert resume(tmp_path) == 7
    assert resume(tmp_path, "disable") is None
    assert resume(tmp_path / "other", "resume_path", tmp_path / "global_step_3") == 3
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3\n")
    assert resume(tmp_path) == 3


def test_what_cannot_be_resumed_says_what_to_do(tmp_path: Path) -> None:
    save(tmp_path, 3)
    with pytest.raises(ValueError, match=r"needs trainer\.resume_from_path"):
        resolve_resume("resume_path", None, tmp_path)
    with pytest.raises(ValueError, match="no such directory"):
        resume(tmp_path, "resume_path", tmp_path / "global_step_4")
    with pytest.raises(ValueError, match="name one of those in it: global_step_3"):
        resume(tmp_path, "resume_path", tmp_path)
    (tmp_path / "elsewhere/global_step_5.incomplete").mkdir(parents=True)
    with pytest.raises(ValueError, match="never finished"):
        resume(tmp_path, "resume_path", tmp_path / "elsewhere/global_step_5.incomplete")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    with pytest.raises(ValueError, match=r"names step '4', but the checkpoints there are of steps \[3\]"):
        resume(tmp_path)


def test_leftovers_of_an_interrupted_save_are_removed(tmp_path: Path) -> None:
    save(tmp_path, 3)
    (tmp_path / "global_step_6.incomplete/actor").mkdir(parents=True)
    (tmp_path / "global_step_3/critic.incomplete").mkdir()
    assert resume(tmp_path) == 3
    assert names(tmp_path) == {"global_step_3", "latest_checkpointed_iteration.txt"}
    assert names(tmp_path / "global_step_3") == {"actor", "critic", "manifest.json"}


def changed(key: str, value: object) -> dict[str, Any]:
    config = json.loads(json.dumps(CONFIG))
    node = config
    *path, last = key.split(".")
    for part in path:
        node = node[part]
    node[last] = value
    return config


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("actor_rollout_ref.actor.optim.lr", 2e-6, "actor_rollout_ref.actor.optim.lr: 1e-06 -> 2e-06"),
        ("data.train_files", ["b.parquet"], r'data.train_files: \["a.parquet"\] -> \["b.parquet"\]'),
        ("data.new_key", True, r"data.new_key: \(not set\) -> true"),
        ("data.train_batch_size", None, "data.train_batch_size: 32 -> null"),
    ],
)
def test_a_change_that_reaches_the_training_is_refused(key: str, value: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_config(CONFIG, changed(key, value))


def test_all_refused_changes_are_named_at_once() -> None:
    current = changed("data.train_batch_size", 64)
    current["actor_rollout_ref"]["actor"]["optim"]["lr"] = 0.5
    with pytest.raises(ValueError, match=r"optim.lr.*train_batch_size"):
        check_config(CONFIG, current)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.total_epochs", 3),
        ("trainer.save_freq", -1),
        ("actor_rollout_ref.rollout.val_kwargs.n", 4),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", 2),
        ("ray_kwargs.ray_init.num_cpus", 4),
    ],
)
def test_a_change_that_does_not_is_told(key: str, value: object) -> None:
    (told,) = check_config(CONFIG, changed(key, value))
    assert told.startswith(f"{key}: ") and told.endswith(f" -> {value}")


def test_a_tuple_equals_the_list_it_was_saved_as_and_a_secret_its_stars(tmp_path: Path) -> None:
    current = changed("actor_rollout_ref.actor.optim.betas", (0.9, 0.999))
    assert check_config(changed("trainer.hf_token", "***"), current) == []


def leaves(tree: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in tree.items():
        found += leaves(value, f"{prefix}{key}.") if isinstance(value, dict) and value else [prefix + key]
    return found


def test_safe_keys_exist_and_no_key_of_the_algorithm_is_among_them() -> None:
    """A misspelt entry would refuse what it means to allow; a loose pattern would allow too much."""
    trees = [yaml.safe_load((ROOT / "configs" / name).read_text()) for name in ("ppo_trainer.yaml", "sft_trainer.yaml")]
    keys = [key for tree in trees for key in leaves(tree)]
    for safe in SAFE_TO_CHANGE:
        pattern = re.escape(safe).replace(r"\*", ".*") + (".*" if safe.endswith(".") else "")
        assert [key for key in keys if re.fullmatch(pattern, key)], safe
    of_the_algorithm = re.compile(r"algorithm|optim\.|clip|loss|seed|mini_batch|epochs$|temperature|train_(files|batch)|path")
    allowed = {key for key in keys if _is_safe(key) and of_the_algorithm.search(key)}
    assert allowed == {
        "trainer.total_epochs",
        "trainer.resume_from_path",
        "actor_rollout_ref.rollout.val_kwargs.temperature",
        "algorithm.rollout_correction.mismatch_bound",
    }


def test_a_checkpoint_that_was_being_removed_is_gone_when_the_run_starts_again(tmp_path: Path) -> None:
    for step, role in ((5, "actor.incomplete"), (10, "actor")):
        (tmp_path / f"global_step_{step}" / role).mkdir(parents=True)
        (tmp_path / f"global_step_{step}" / "manifest.json").write_text("{}")
    _remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_10"]
