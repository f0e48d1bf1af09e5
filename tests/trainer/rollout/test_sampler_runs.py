"""Complete runs on the quick start's task, with batches filled in rounds and shaped rewards."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.runs import make_task, repeatable, run_ppo

# Right or wrong by the length of the response: a model with random weights gets both.
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    right = len(solution_str) % 2
    return {"score": 2.0 * right - 1.0, "acc": right, "length": len(solution_str)}
"""
FILTER = (
    "algorithm=grpo", "algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=acc", "data.gen_batch_size=6",
    "actor_rollout_ref.rollout.n=2", "trainer.total_training_steps=3", "trainer.save_freq=1",
    "reward.shaping.normalize=running", "reward_model.overlong_buffer.enable=true", "reward_model.overlong_buffer.len=4",
    "reward_model.overlong_buffer.penalty_factor=0.5", "reward_model.overlong_buffer.log=true",
    "reward_model.reward_manager=dapo",
)  # fmt: skip


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    task = make_task(tmp_path_factory.mktemp("sort_digits"), train_size=96, sft_size=8)
    (task / "reward.py").write_text(REWARD)
    return task


def test_run_with_filtered_rounds_resumes_bitwise(task: Path, tmp_path: Path) -> None:
    def dumps(name: str) -> tuple[str, ...]:
        return (*FILTER, f"trainer.rollout_data_dir={tmp_path / name / 'rollouts'}")

    whole = run_ppo(task, tmp_path / "whole", *dumps("whole"))
    seen: list[int] = []
    for step, metrics in enumerate(whole, 1):
        rows = pq.read_table(tmp_path / "whole" / "rollouts" / f"step_{step}.parquet").to_pydict()
        groups = [rows["score"][i : i + 2] for i in range(0, 16, 2)]
        assert len(set(rows["uid"])) == 8 and all(sorted(group) == [-1.0, 1.0] for group in groups)
        seen += rows["uid"][::2]
        dropped = sum(metrics[f"training/filter_groups/dropped_{verdict}"] for verdict in ("low", "high", "failed"))
        assert metrics["training/filter_groups/groups"] == 6 * metrics["training/filter_groups/rounds"]
        assert metrics["training/filter_groups/groups"] - dropped - metrics["training/filter_groups/surplus"] == 8
        assert metrics["critic/score/mean"] == 0.0 and metrics["reward/acc/mean"] == 0.5
        assert metrics["reward/overlong/mean"] > 0 > metrics["reward/overlong_reward/mean"]
    assert len(set(seen)) == 24, "each step continues in the data where the previous one stopped"
    assert {step["training/filter_groups/rounds"] for step in whole} != {2.0}, "a step must have more rounds"

    run_ppo(task, tmp_path / "broken", *dumps("broken"), "trainer.total_training_steps=1")
    manifest = tmp_path / "broken" / "global_step_1" / "manifest.json"
    assert 0 < json.loads(manifest.read_text())["state"]["filter_groups"]["kept_share"] < 1
    assert repeatable(run_ppo(task, tmp_path / "broken", *dumps("broken"))) == repeatable(whole)
