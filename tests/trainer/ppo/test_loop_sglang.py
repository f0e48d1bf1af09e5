"""The complete loop, in one process, on SGLang."""

from pathlib import Path

import pytest

from tests.runs import make_task, run_ppo
from tests.workers.rollout.vllm_workers import CPU_BUILD

pytestmark = CPU_BUILD


@pytest.mark.soak
def test_quick_start_model_trains_and_its_first_update_is_on_policy(tmp_path: Path) -> None:
    task = make_task(tmp_path / "task")
    first, second = run_ppo(task, tmp_path / "run", "rollout=sglang", "actor_rollout_ref.rollout.tensor_model_parallel_size=1")
    assert first["actor/pg_clipfrac"] == 0.0 and first["actor/ppo_kl"] == pytest.approx(0.0, abs=1e-7)
    for step in (first, second):
        assert step["training/rollout_log_probs_diff_max"] < 1e-5
        assert step["actor/grad_norm"] > 0.0


@pytest.mark.soak
def test_every_step_is_on_policy_when_only_the_adapter_is_synced(tmp_path: Path) -> None:
    """The base was synced once. The mismatch of an engine that kept the first policy would grow with each step."""
    lora = [
        "actor_rollout_ref.model.lora_rank=8",
        "actor_rollout_ref.model.lora_alpha=32",
        "actor_rollout_ref.actor.optim.lr=1e-2",
    ]
    alone = [
        "rollout=sglang",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.lora_sync=adapter",
    ]
    steps = run_ppo(make_task(tmp_path / "task"), tmp_path / "run", *alone, *lora, "trainer.total_training_steps=4")
    assert all(step["training/rollout_log_probs_diff_max"] < 1e-5 for step in steps)
    assert all(step["actor/grad_norm"] > 0.0 for step in steps)
    (of_adapter,) = {step["rollout/verified_bytes"] for step in steps}
    assert 0 < of_adapter < 200_000, "the complete model has 900,000"
