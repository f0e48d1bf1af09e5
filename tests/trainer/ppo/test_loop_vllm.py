"""The whole loop, in one process, on vLLM."""

import shutil
from pathlib import Path

import pytest

from data_preprocess import tiny_model
from tests.runs import make_task, repeatable, run_ppo
from tests.workers.rollout.vllm_hosts import CPU_BUILD

pytestmark = CPU_BUILD

VLLM = ("rollout=vllm", "actor_rollout_ref.rollout.tensor_model_parallel_size=1")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With heads of 32 numbers: on CPU vLLM has no smaller ones."""
    folder = make_task(tmp_path_factory.mktemp("task"))
    shutil.rmtree(folder / "base")
    tiny_model.main([f"--save_dir={folder / 'base'}", "--num_attention_heads=3", "--num_key_value_heads=1"])
    return folder


def test_a_run_repeats_to_the_bit_and_its_first_update_is_on_policy(task: Path, tmp_path: Path) -> None:
    first, second = (run_ppo(task, tmp_path / name, *VLLM) for name in ("first", "second"))
    assert len(first) == 2 and repeatable(first) == repeatable(second)
    assert first[0]["actor/pg_clipfrac"] == 0.0 and first[0]["actor/ppo_kl"] == pytest.approx(0.0, abs=1e-7)
    assert first[0]["training/rollout_log_probs_diff_max"] < 1e-5


def test_awake_all_the_time_it_gives_the_same(task: Path, tmp_path: Path) -> None:
    asleep, awake = (
        run_ppo(task, tmp_path / free, *VLLM, f"actor_rollout_ref.rollout.free_cache_engine={free}") for free in ("true", "false")
    )
    assert repeatable(asleep) == repeatable(awake)
