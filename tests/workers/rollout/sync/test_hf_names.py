"""Names and views of experts as files have them, against what transformers writes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MixtralConfig, PretrainedConfig

from tests.tiny import tiny_config
from workers.rollout.sync.hf_names import FileNames

CONFIGS = {
    "qwen2": tiny_config("qwen2"),
    "qwen3_moe": tiny_config("qwen3_moe", mlp_only_layers=[0]),
    "mixtral": MixtralConfig(**{**tiny_config("llama").to_diff_dict(), "model_type": "mixtral"}, num_local_experts=4),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_they_are_those_of_a_saved_model_and_share_its_memory(config: PretrainedConfig, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    with torch.device("meta"):
        shell = AutoModelForCausalLM.from_config(config)
    split = dict(FileNames(shell).split(model.state_dict().items()))
    saved = load_file(tmp_path / "model.safetensors")
    assert split.keys() == saved.keys()
    assert [name for name, weight in split.items() if not torch.equal(weight, saved[name])] == []
    held = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    assert {weight.untyped_storage().data_ptr() for weight in split.values()} == held


def test_a_layout_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of this model have its experts turned."""
    from workers.rollout.sync import hf_names

    reported = hf_names.revert_weight_conversion

    def turned(*args: object) -> dict[str, torch.Tensor]:
        return {name: weight.flip(0) if "up_proj" in name else weight for name, weight in reported(*args).items()}

    monkeypatch.setattr(hf_names, "revert_weight_conversion", turned)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS["qwen3_moe"])
    with pytest.raises(ValueError, match=r"qwen3_moe: model.layers.1.mlp.experts.gate_up_proj is laid out in files in a way"):
        FileNames(model)
