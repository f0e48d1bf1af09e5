"""Complete runs in this process, on the quick start's task."""

import json
import shutil
from pathlib import Path

from data_preprocess import sort_digits, tiny_model
from trainer import main_ppo

NOT_REPEATABLE = ("timing", "perf/")
# Every response has a nonzero score, so that a model with random weights learns from its first step.
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(a == b for a, b in zip(solution_str, ground_truth)) + solution_str.count("7") / 8
"""


def make_task(folder: Path, **sizes: int) -> Path:
    """Data, a model with random weights and a reward: folder/{train,test,sft,preferences,preferences_test}.parquet, folder/base,
    folder/reward.py.
    """
    plain = {"train_size": 512, "test_size": 32, "sft_size": 512, "preferences_size": 64, "preferences_test_size": 32}
    sort_digits.main([f"--local_save_dir={folder}", *(f"--{name}={value}" for name, value in (plain | sizes).items())])
    tiny_model.main([f"--save_dir={folder / 'base'}"])
    (folder / "reward.py").write_text(REWARD)
    return folder


def without_eos(model: Path, target: Path) -> Path:
    """A copy of the model whose files name no end token."""
    shutil.copytree(model, target)
    for name, key in (("tokenizer_config", "eos_token"), ("config", "eos_token_id"), ("generation_config", "eos_token_id")):
        file = target / f"{name}.json"
        output = json.loads(file.read_text())
        del output[key]
        file.write_text(json.dumps(output))
    return target


def ppo_arguments(task: Path, run_dir: Path, *overrides: str) -> list[str]:
    """A small run of the quick start, in this process."""
    return [
        "recipe=quickstart", "trainer.backend=local", "trainer.logger=[]", "reward.num_workers=0",
        f"data.train_files={task}/train.parquet", f"data.val_files={task}/test.parquet",
        f"actor_rollout_ref.model.path={task}/base", f"critic.model.path={task}/base",
        f"reward.custom_reward_function.path={task}/reward.py",
        "data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.rollout.n=4",
        "trainer.total_training_steps=2", "trainer.test_freq=-1", "trainer.save_freq=-1", "trainer.val_before_train=false",
        f"trainer.default_local_dir={run_dir}", *overrides,
    ]  # fmt: skip


def run_ppo(task: Path, run_dir: Path, *overrides: str) -> list[dict[str, float]]:
    """Run to completion and read metrics.jsonl."""
    code = main_ppo.PROGRAM(ppo_arguments(task, run_dir, *overrides))
    assert code == 0
    return metrics_of(run_dir)


def metrics_of(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def repeatable(steps: list[dict[str, float]]) -> list[dict[str, float]]:
    """Remove metrics that depend on the clock."""
    return [{name: value for name, value in step.items() if not name.startswith(NOT_REPEATABLE)} for step in steps]
