"""A run directory of version 62017dd, before modules moved to folders, is resumed with the same command and gives equal numbers.

before_the_move/ has a run of PPO after four steps with its checkpoint of step 2, a model of 2,592 parameters, data and
reward.
"""

import json
import shutil
from pathlib import Path

import pytest

from trainer import main_ppo

RUN = Path(__file__).with_name("before_the_move")
COMMAND = [
    "recipe=quickstart",
    "data.train_files=data/train.parquet",
    "data.val_files=data/test.parquet",
    "actor_rollout_ref.model.path=model",
    "critic.model.path=model",
    "algorithm=ppo",
    "reward.custom_reward_function.path=score.py",
    "reward.num_workers=0",
    "trainer.backend=local",
    "trainer.total_training_steps=4",
    "trainer.save_freq=2",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    "data.train_batch_size=16",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "critic.ppo_mini_batch_size=16",
    "actor_rollout_ref.rollout.n=2",
    "trainer.default_local_dir=run",
]
CLOCK = ("timing", "perf/")


def steps_of(run_dir: Path) -> dict[int, dict[str, float]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {int(line["training/global_step"]): {k: v for k, v in line.items() if not k.startswith(CLOCK)} for line in lines}


def test_old_run_resumes_with_the_numbers_of_its_own_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models, optimizer moments, data order, KL controller and seeds are those of the checkpoint, or steps 3 and 4 would differ.
    Equality is bitwise where the processor is the same; another one may round otherwise."""
    shutil.copytree(RUN, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    written = steps_of(tmp_path / "run")
    assert main_ppo.PROGRAM(COMMAND) == 0
    found = steps_of(tmp_path / "run")
    assert sorted(found) == [1, 2, 3, 4]
    for step in (3, 4):
        assert found[step].keys() == written[step].keys()
        assert found[step] == pytest.approx(written[step], rel=1e-4, abs=1e-6)
        assert found[step]["actor/grad_norm"] > 0.01
