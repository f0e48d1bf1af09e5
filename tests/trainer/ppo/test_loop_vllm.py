"""The complete loop, in one process, on vLLM."""

import json
import shutil
from pathlib import Path

import pytest

from data_preprocess import tiny_model
from tests.runs import make_task, repeatable, run_ppo
from tests.workers.rollout.vllm_workers import CPU_BUILD
from trainer.run.run_dir import START

pytestmark = CPU_BUILD

VLLM = ("rollout=vllm", "actor_rollout_ref.rollout.tensor_model_parallel_size=1")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With heads of size 32: vLLM has no smaller ones on CPU."""
    folder = make_task(tmp_path_factory.mktemp("task"))
    shutil.rmtree(folder / "base")
    tiny_model.main([f"--save_dir={folder / 'base'}", "--num_attention_heads=3", "--num_key_value_heads=1"])
    return folder


def test_run_repeats_bitwise_and_its_first_update_is_on_policy(task: Path, tmp_path: Path) -> None:
    first, second = (run_ppo(task, tmp_path / name, *VLLM) for name in ("first", "second"))
    assert len(first) == 2 and repeatable(first) == repeatable(second)
    assert first[0]["actor/pg_clipfrac"] == 0.0 and first[0]["actor/ppo_kl"] == pytest.approx(0.0, abs=1e-7)
    assert first[0]["training/rollout_log_probs_diff_max"] < 1e-5
    start = json.loads((tmp_path / "first" / START).read_text())
    parts = [start[f"ranks/rollout/{part}"] for part in ("device", "model", "compile and profile", "capture")]
    assert 0 < sum(parts) <= start["ranks/rollout"] <= start["engine"] + 0.01 and "ranks/engine imports" in start


@pytest.mark.soak
def test_engine_that_never_sleeps_gives_the_same_run(task: Path, tmp_path: Path) -> None:
    asleep, awake = (
        run_ppo(task, tmp_path / free, *VLLM, f"actor_rollout_ref.rollout.free_cache_engine={free}") for free in ("true", "false")
    )
    assert repeatable(asleep) == repeatable(awake)


@pytest.mark.soak
def test_every_step_uses_the_adapter_of_the_last_update(task: Path, tmp_path: Path) -> None:
    """Only the adapter is synced after the first step; the base weights were synced before it."""
    model, rollout = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
    lora = (f"{model}.lora_rank=8", f"{model}.lora_alpha=32", "actor_rollout_ref.actor.optim.lr=1e-2")
    steps = run_ppo(task, tmp_path, *VLLM, *lora, f"{rollout}.lora_sync=adapter", "trainer.total_training_steps=4")
    assert len(steps) == 4 and max(step["training/rollout_log_probs_diff_max"] for step in steps) < 1e-5
    assert all(step["actor/grad_norm"] > 0 for step in steps)
    sizes = {step["rollout/verified_bytes"] for step in steps}
    assert len(sizes) == 1 and sizes.pop() < sum(file.stat().st_size for file in (task / "base").glob("*.safetensors")) / 2


APART = (
    "trainer.backend=ray", "trainer.n_gpus_per_node=3", "placement=custom", "placement.roles.actor=train",
    "placement.roles.rollout=engines", "placement.pools.train={nodes: 1, gpus: 1, fraction: 1.0}",
    "placement.pools.engines={nodes: 1, gpus: 2, fraction: 1.0}",
)  # fmt: skip


@pytest.mark.soak
def test_disaggregated_engines_on_two_ranks_give_the_same_numbers(task: Path, tmp_path: Path) -> None:
    words = (*VLLM, "actor_rollout_ref.rollout.verify_weights=full", "trainer.total_training_steps=3")
    adjacent, apart = run_ppo(task, tmp_path / "adjacent", *words), run_ppo(task, tmp_path / "apart", *words, *APART)
    assert len(apart) == 3
    for mine, expected in zip(repeatable(apart), repeatable(adjacent), strict=True):
        assert mine.keys() == expected.keys() and mine["training/rollout_log_probs_diff_max"] < 1e-5
        assert mine.pop("rollout/verified_bytes") == 2 * expected.pop("rollout/verified_bytes"), "on each rank"
        assert mine == pytest.approx(expected, rel=1e-4, abs=1e-6)
