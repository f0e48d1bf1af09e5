"""Which adapters a model can have, and the errors for those that it cannot. No process group, no weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.pickles import malicious_pickle
from tests.tiny import model_config
from workers.engine.fsdp.lora import adapter_config, check_fit, merge_from
from workers.engine.hf.hf_model import PackedModel
from workers.roles.train_engines import check_adapter

ALL = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def complaint(model: Any, head: Any = "lm") -> str:
    with pytest.raises((ValueError, FileNotFoundError)) as raised:
        check_fit(model, head)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def save_adapter(path: str, folder: Path, **fields: Any) -> Path:
    """As a user of peft makes one."""
    torch.manual_seed(1)
    config = LoraConfig(**({"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]} | fields))
    get_peft_model(AutoModelForCausalLM.from_pretrained(path), config).save_pretrained(folder)
    return folder


@pytest.fixture
def adapter(models: dict[str, str], tmp_path: Path) -> Path:
    return save_adapter(models["qwen2"], tmp_path / "adapter")


def test_a_model_without_keys_has_none(models: dict[str, str]) -> None:
    assert adapter_config(model_config(models["qwen2"])) is None
    check_adapter("actor", model_config("nowhere"), "lm")


@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize(
    "modules", ["all-linear", ["q_proj", "v_proj"], ["layers.0.mlp.up_proj"], r".*self_attn\.(q|v)_proj", r"model\.layers\.1\..*"]
)
def test_modules_by_name_and_by_pattern(models: dict[str, str], head: Any, modules: Any) -> None:
    check_fit(model_config(models["qwen3"], lora_rank=2, target_modules=modules), head)


@pytest.mark.parametrize(
    ("modules", "reported"),
    [
        (["q_proj", "qq_proj"], "qq_proj is no layer in the body of"),
        (["lm_head"], "lm_head is no layer in the body of"),
        (["embed_tokens"], "embed_tokens is no layer in the body of"),
        (["score"], "score is no layer in the body of"),
        ("q_proj", "a pattern that fits no whole name, such as model.layers.0.self_attn.q_proj; names alone are a list"),
        ("(q_proj", "no pattern: missing )"),
    ],
)
def test_modules_that_there_are_not(models: dict[str, str], modules: Any, reported: str) -> None:
    line = complaint(model_config(models["qwen2"], lora_rank=2, target_modules=modules))
    assert reported in line
    assert "no pattern" in reported or line.endswith(f"linear layers there are {', '.join(sorted(ALL))}")
    with pytest.raises(ValueError, match=r"^actor_rollout_ref.actor: model.target_modules"):
        check_adapter("actor_rollout_ref.actor", model_config(models["qwen2"], lora_rank=2, target_modules=modules), "lm")


def test_an_adapter_of_pefts_fits(models: dict[str, str], adapter: Path) -> None:
    model = model_config(models["qwen2"], lora_adapter_path=str(adapter))
    check_fit(model, "lm")
    check_fit(model_config(models["qwen2"], lora_adapter_path=str(adapter), lora_rank=4), "lm")
    check_fit(model_config(models["qwen2"], lora_adapter_path=str(adapter)), "value")
    config = adapter_config(model)
    assert config is not None and (config.r, config.lora_alpha) == (4, 8)


def test_an_adapter_of_another_rank(models: dict[str, str], adapter: Path) -> None:
    line = complaint(model_config(models["qwen2"], lora_adapter_path=str(adapter), lora_rank=8))
    assert line == f"model.lora_rank=8: the adapter in model.lora_adapter_path {adapter} has r=4; leave it out"


@pytest.mark.parametrize(
    ("fields", "reported"),
    [
        ({"use_dora": True}, "use_dora in adapter_config.json: that is more than LoRA"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern in adapter_config.json"),
        ({"bias": "all"}, "bias in adapter_config.json"),
        ({"init_lora_weights": "pissa"}, "may belong to a base that was changed with it"),
        ({"target_modules": ["lm_head"]}, "lm_head is no linear layer in the body of this model"),
    ],
)
def test_an_adapter_that_is_more_than_lora(models: dict[str, str], tmp_path: Path, fields: dict[str, Any], reported: str) -> None:
    folder = save_adapter(models["qwen2"], tmp_path / "adapter", **fields)
    assert reported in complaint(model_config(models["qwen2"], lora_adapter_path=str(folder)))


@pytest.mark.parametrize("spoilt", ["missing", "unexpected", "shape", "kind", "no weights"])
def test_an_adapter_that_does_not_fit(models: dict[str, str], adapter: Path, spoilt: str) -> None:
    file, config = adapter / "adapter_model.safetensors", adapter / "adapter_config.json"
    weights, name = load_file(file), "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"
    reported = {
        "missing": f"1 weights are not there, such as {name}",
        "unexpected": "1 weights fit nowhere in this model, such as base_model.model.more",
        "shape": f"{name} is (16, 5) there and (16, 4) in this model",
        "kind": "peft_type is LOHA, not LORA",
        "no weights": "no weight of LoRA in adapter_model.safetensors",
    }[spoilt]
    if spoilt == "missing":
        del weights[name]
    if spoilt == "unexpected":
        weights["base_model.model.more"] = torch.zeros(1)
    if spoilt == "shape":
        weights[name] = torch.zeros(16, 5)
    if spoilt == "kind":
        config.write_text(json.dumps(json.loads(config.read_text()) | {"peft_type": "LOHA"}))
    save_file({} if spoilt == "no weights" else weights, file)
    assert (
        complaint(model_config(models["qwen2"], lora_adapter_path=str(adapter)))
        == f"model.lora_adapter_path {adapter}: {reported}"
    )


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_nothing_but_two_files_is_read(models: dict[str, str], adapter: Path, name: str) -> None:
    """A pickle next to the weights is ignored."""
    (adapter / name).unlink()
    (adapter / "adapter_model.bin").write_bytes(malicious_pickle(adapter / "harmed"))
    line = complaint(model_config(models["qwen2"], lora_adapter_path=str(adapter)))
    assert line == f"model.lora_adapter_path {adapter}: no {name} there (expected a directory of peft's)"
    assert not (adapter / "harmed").exists()


@torch.no_grad()
def test_an_adapter_is_merged_in_float32_whatever_its_base_is_in(models: dict[str, str], tmp_path: Path) -> None:
    """In bfloat16, which peft uses for such a base, its numbers would be rounded twice more."""
    path = save_adapter(models["qwen2"], tmp_path / "adapter", init_lora_weights=False)
    hf = AutoModelForCausalLM.from_pretrained(models["qwen2"], dtype=torch.bfloat16)
    name, own = "model.layers.0.self_attn.q_proj", load_file(path / "adapter_model.safetensors")
    a, b = (own[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
    wanted = hf.get_parameter(f"{name}.weight").float() + (b @ a) * 2
    assert torch.equal(merge_from(path, PackedModel(hf, "lm"))[f"{name}.weight"], wanted.bfloat16())
