"""A complete run of a mixture of experts."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.runs import make_task, ppo_arguments, repeatable, run_ppo
from tests.tiny import tiny_config
from trainer import main_export, main_ppo


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    task = make_task(tmp_path_factory.mktemp("sort_digits"))
    torch.manual_seed(0)
    config = tiny_config("qwen3_moe", vocab_size=len(AutoTokenizer.from_pretrained(task / "base")))
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(task / "base")
    return task


def test_mixture_of_experts_is_on_policy_resumes_bitwise_and_is_exported(task: Path, tmp_path: Path) -> None:
    """With a critic, which is a mixture of experts too."""
    words = ("algorithm=ppo", "actor_rollout_ref.model.router_aux_loss_coef=0.01", "trainer.save_freq=2")
    whole = run_ppo(task, tmp_path / "whole", *words, "trainer.total_training_steps=3")
    for step in whole:
        assert 0 < step["training/rollout_log_probs_diff_max"] < 1e-5
        assert step["actor/grad_norm"] > 0 and step["rollout/verified_bytes"] > 0
        for role in ("actor", "critic"):
            assert 1.9 < step[f"{role}/moe_aux_loss"] < 3.0
            assert 1.0 < step[f"{role}/moe_load_max_over_mean"] <= 4.0
            assert 0.0 <= step[f"{role}/moe_dead_experts"] < 1.0
    run_ppo(task, tmp_path / "cut", *words)
    resumed = run_ppo(task, tmp_path / "cut", *words, "trainer.total_training_steps=3")
    assert repeatable(resumed) == repeatable(whole)
    assert main_export.PROGRAM([f"checkpoint={tmp_path}/cut", "role=actor", f"output={tmp_path}/model"]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.model_type == "qwen3_moe"


def test_auxiliary_loss_of_a_dense_model_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense = make_task(tmp_path)
    words = ppo_arguments(dense, tmp_path / "run", "actor_rollout_ref.model.router_aux_loss_coef=0.01")
    assert main_ppo.PROGRAM(words) != 0
    reported = capsys.readouterr().err.strip().splitlines()[-1]
    assert "router_aux_loss_coef=0.01" in reported and "has no routers to balance; leave it at 0" in reported
