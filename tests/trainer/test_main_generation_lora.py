"""Responses of a model with an adapter from disk."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.runs import make_task
from tests.trainer.test_main_generation import arguments, generate
from trainer import main_generation


def test_responses_equal_those_of_the_merged_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    task = make_task(tmp_path / "task", train_size=16, test_size=32, sft_size=16)
    torch.manual_seed(0)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(task / "base"),
        LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "up_proj"], init_lora_weights=False),
    )
    model.save_pretrained(tmp_path / "adapter")
    model.merge_and_unload().save_pretrained(tmp_path / "whole")
    AutoTokenizer.from_pretrained(task / "base").save_pretrained(tmp_path / "whole")
    greedy = ("actor_rollout_ref.rollout.n=1", "actor_rollout_ref.rollout.do_sample=false")
    adapter = f"actor_rollout_ref.model.lora_adapter_path={tmp_path}/adapter"
    rows = {
        "adapter": generate(task, tmp_path / "one", *greedy, adapter),
        "whole": generate(task, tmp_path / "two", *greedy, f"actor_rollout_ref.model.path={tmp_path}/whole"),
        "base": generate(task, tmp_path / "three", *greedy),
    }
    answers = {name: [row["responses"] for row in found] for name, found in rows.items()}
    assert answers["adapter"] == answers["whole"] != answers["base"]
    capfd.readouterr()
    assert main_generation.PROGRAM(arguments(task, tmp_path / "four", f"{adapter}s")) == 2
    assert f"model.lora_adapter_path {tmp_path}/adapters: no adapter_config.json there" in capfd.readouterr().err
