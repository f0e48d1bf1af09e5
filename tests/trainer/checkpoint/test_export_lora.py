"""From runs that train a LoRA adapter to directories of peft and of transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from tests.runs import make_task, run_ppo
from tests.trainer.supervised.test_supervised_loop import run as run_sft
from trainer import main_export


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("sort_digits"))


@pytest.fixture(scope="module")
def run_dir(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    optim = ("actor_rollout_ref.actor.optim.lr=5e-2", "actor_rollout_ref.actor.optim.lr_warmup_steps=0")
    lora = ("actor_rollout_ref.model.lora_rank=4", "critic.model.lora_rank=4", *optim)
    run_ppo(task, folder, "algorithm=ppo", *lora, "critic.model.target_modules=[q_proj,down_proj]", "trainer.save_freq=2")
    return folder


def export(output: Path, *words: str) -> int:
    return main_export.PROGRAM([*words, f"output={output}"])


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model.eval()(torch.arange(12)[None]).logits


@torch.no_grad()
def greedy(model: nn.Module) -> list[int]:
    ids = [3, 1, 2]
    for _ in range(8):
        ids.append(int(model.eval()(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids


def test_exported_adapter_loads_in_peft(task: Path, run_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert export(tmp_path / "adapter", f"checkpoint={run_dir}") == 0
    reported, names = capfd.readouterr().out, {path.name for path in (tmp_path / "adapter").iterdir()}
    assert names >= {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} and "config.json" not in names
    assert f"weights of its adapter in {tmp_path}" in reported
    base = AutoModelForCausalLM.from_pretrained(task / "base")
    before = logits(base)
    model = PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert export(tmp_path / "whole", f"checkpoint={run_dir}", "merge=true") == 0
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    assert "adapter_config.json" not in {path.name for path in (tmp_path / "whole").iterdir()}
    assert (logits(model) - logits(whole)).abs().max() < 1e-5 < 1e-2 < (logits(whole) - before).abs().max()
    assert greedy(model) == greedy(whole)
    merged = model.merge_and_unload()
    assert all(torch.equal(param, merged.get_parameter(name)) for name, param in whole.named_parameters())
    for name in ("adapter", "whole"):
        assert (
            AutoTokenizer.from_pretrained(tmp_path / name).get_vocab() == AutoTokenizer.from_pretrained(task / "base").get_vocab()
        )
    config: dict[str, Any] = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == f"{task}/base" and config["task_type"] == "CAUSAL_LM"


def test_exported_critic_adapter_includes_the_head(task: Path, run_dir: Path, tmp_path: Path) -> None:
    assert export(tmp_path / "adapter", f"checkpoint={run_dir}", "role=critic") == 0
    assert export(tmp_path / "whole", f"checkpoint={run_dir}", "role=critic", "merge=true") == 0
    base = AutoModelForTokenClassification.from_pretrained(task / "base", num_labels=1)
    model = PeftModel.from_pretrained(base, tmp_path / "adapter")
    whole = AutoModelForTokenClassification.from_pretrained(tmp_path / "whole")
    assert (logits(model) - logits(whole)).abs().max() < 1e-6 and logits(whole).abs().max() > 1e-3
    weights = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert torch.equal(weights["base_model.model.score.weight"], whole.score.weight)
    assert {name.split(".")[-3] for name in weights if ".lora_" in name} == {"q_proj", "down_proj"}


def test_exported_adapter_is_the_start_of_a_run(task: Path, run_dir: Path, tmp_path: Path) -> None:
    assert export(tmp_path / "adapter", f"checkpoint={run_dir}") == 0
    assert export(tmp_path / "whole", f"checkpoint={run_dir}", "merge=true") == 0
    begun = f"actor_rollout_ref.model.lora_adapter_path={tmp_path}/adapter"
    one_step = ("trainer.total_training_steps=1", "trainer.rollout_data_dir=null")
    adapter = run_ppo(task, tmp_path / "one", begun, *one_step)
    whole = run_ppo(task, tmp_path / "other", *one_step, f"actor_rollout_ref.model.path={tmp_path}/whole")
    assert adapter[0]["critic/score/mean"] == whole[0]["critic/score/mean"]
    assert adapter[0]["training/rollout_probs_diff_max"] < 1e-5


def test_missing_base_model_is_a_one_line_error(task: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "base").symlink_to(task / "base")
    words = ("trainer.save_freq=1", "trainer.total_training_steps=1", "actor_rollout_ref.model.lora_rank=2")
    run_ppo(task, tmp_path / "run", *words, f"actor_rollout_ref.model.path={tmp_path}/base")
    (tmp_path / "base").unlink()
    capfd.readouterr()
    assert export(tmp_path / "whole", f"checkpoint={tmp_path}/run", "merge=true") == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert f"merge=true: the adapter's base model is not at {tmp_path}/base, where " in line
    assert export(tmp_path / "adapter", f"checkpoint={tmp_path}/run") == 0


def test_supervised_adapter_run_exports_the_merged_model(task: Path, tmp_path: Path) -> None:
    """The run's export is a complete model: PPO can start from it."""
    words = ("model.lora_rank=4", "optim.lr=1e-2", "trainer.total_training_steps=3")
    steps = run_sft(task, tmp_path / "run", *words, f"trainer.export_dir={tmp_path}/exported")
    assert steps[-1]["val/loss"] < steps[0]["val/loss"]
    assert export(tmp_path / "adapter", f"checkpoint={tmp_path}/run") == 0
    base = AutoModelForCausalLM.from_pretrained(task / "base")
    merged = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert all(torch.equal(param, merged.get_parameter(name)) for name, param in exported.named_parameters())
