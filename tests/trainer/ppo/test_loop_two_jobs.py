"""Two concurrent runs on one machine, on every engine. Long: scripts/test.sh soak."""

import subprocess
import sys
from pathlib import Path

import pytest

from data_preprocess import tiny_model
from tests.runs import make_task, metrics_of, ppo_arguments
from tests.workers.rollout.vllm_workers import CPU_BUILD
from workers.roles.rollout_engines import ENGINES

pytestmark = [CPU_BUILD, pytest.mark.soak]
STEPS = 4


@pytest.mark.parametrize("engine", ENGINES)
def test_concurrent_jobs_do_not_interfere(engine: str, tmp_path: Path) -> None:
    """Each has its own model and an engine of two ranks; weights of the other job would show as a mismatch of log-probs."""
    task = make_task(tmp_path / "task")
    jobs = []
    for seed in (1, 2):
        model, run_dir = tmp_path / f"model-{seed}", tmp_path / f"run-{seed}"
        tiny_model.main(
            [f"--save_dir={model}", f"--seed={seed}", "--num_attention_heads=6", "--num_key_value_heads=2", "--hidden_size=192"]
        )
        arguments = ppo_arguments(
            task, run_dir, f"actor_rollout_ref.rollout.name={engine}", "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
            "trainer.backend=ray", "trainer.n_gpus_per_node=2", f"trainer.seed={seed}", f"trainer.total_training_steps={STEPS}",
            f"actor_rollout_ref.model.path={model}", "reward.num_workers=1",
        )  # fmt: skip
        jobs.append((subprocess.Popen([sys.executable, "-m", "trainer.main_ppo", *arguments]), run_dir))
    assert [job.wait(600) for job, _ in jobs] == [0, 0]
    for _, run_dir in jobs:
        steps = metrics_of(run_dir)
        assert len(steps) == STEPS
        assert max(step["training/rollout_log_probs_diff_max"] for step in steps) < 1e-4
