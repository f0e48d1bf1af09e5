"""Whether an engine is there and can hold a model, before a worker is asked."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig

from configs.defaults import ppo_config
from configs.schema.common import ModelConfig, ShardedConfig, TiledMLPConfig
from tests.tiny import model_config, save_tiny_model, tiny_config
from workers.roles import train_engines
from workers.roles.train_engines import check_engine

ACTOR = "actor_rollout_ref.actor"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    path = save_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    return replace(ppo_config().actor_rollout_ref.model, path=path)


def role(strategy: Any, **changes: Any) -> ShardedConfig:
    actor = ppo_config().actor_rollout_ref.actor
    return replace(actor, strategy=strategy, megatron=replace(actor.megatron, **changes))


def test_what_it_can_hold(model: ModelConfig) -> None:
    check_engine(ACTOR, role("megatron", tensor_model_parallel_size=2), model, "lm", "cpu")
    check_engine("critic", role("megatron", pipeline_model_parallel_size=2), model, "value", "cpu")
    check_engine(ACTOR, role("fsdp", tensor_model_parallel_size=3), replace(model, path="not/there/at/all"), "lm", "cpu")


def test_what_it_cannot(model: ModelConfig) -> None:
    with pytest.raises(ValueError, match=r"^critic: megatron.tensor_model_parallel_size=3 does not divide"):
        check_engine("critic", role("megatron", tensor_model_parallel_size=3), model, "value", "cpu")
    with pytest.raises(FileNotFoundError, match="no such directory"):
        check_engine(ACTOR, role("megatron"), replace(model, path="not/there/at/all"), "lm", "cpu")
    changed = replace(model, override_config={"num_hidden_layers": 3})
    with pytest.raises(ValueError, match="num_hidden_layers=3 do not fall"):
        check_engine(ACTOR, role("megatron", pipeline_model_parallel_size=2), changed, "lm", "cpu")


def test_mlps_that_cannot_be_taken_in_pieces(tmp_path: Path) -> None:
    sizes = tiny_config("qwen3").to_diff_dict()
    Qwen3MoeConfig(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, **sizes).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    experts = model_config(str(tmp_path), tiled_mlp=TiledMLPConfig(enabled=True, num_shards=2))
    with pytest.raises(ValueError, match=rf"^{ACTOR}: model.tiled_mlp.enabled=true: Qwen3MoeDecoderLayer has no MLP of gate"):
        check_engine(ACTOR, role("fsdp"), experts, "lm", "cpu")
    check_engine(ACTOR, role("fsdp"), model_config(save_tiny_model(tmp_path / "dense"), tiled_mlp=experts.tiled_mlp), "lm", "cpu")


def test_a_cpu_of_a_machine_with_gpus(model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron asks torch for CUDA's device, whatever is configured."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="takes the GPUs of a machine that has some"):
        check_engine(ACTOR, role("megatron"), model, "lm", "cpu")
    check_engine(ACTOR, role("megatron"), model, "lm", "cuda")
    check_engine(ACTOR, role("fsdp"), model, "lm", "cpu")


@pytest.mark.parametrize("there", [(), ("megatron",)], ids=["nothing", "another_package_of_that_name"])
def test_a_missing_engine_is_one_line(there: tuple[str, ...], model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_engines, "find_spec", lambda name: object() if name in there else None)
    with pytest.raises(ValueError) as error:
        check_engine(ACTOR, role("megatron"), model, "lm", "cpu")
    assert str(error.value) == (
        f"{ACTOR}.strategy=megatron: megatron-core is not installed here; run scripts/install_engine.sh megatron cpu, "
        "or on a machine with a GPU scripts/install_engine.sh megatron cuda"
    )
    check_engine(ACTOR, role("fsdp"), model, "lm", "cpu")


@pytest.mark.parametrize("strategy", ["fsdp", "megatron"])
def test_routers_to_balance(model: ModelConfig, strategy: Any) -> None:
    """Of either engine: a dense model has none."""
    with pytest.raises(ValueError, match=r"^critic: model.router_aux_loss_coef=0.01: .* \(qwen2\) has no routers to balance"):
        check_engine("critic", role(strategy), replace(model, router_aux_loss_coef=0.01), "value", "cpu")


def test_a_mixture_of_experts(tmp_path: Path, model: ModelConfig) -> None:
    mixture = replace(model, path=save_tiny_model(tmp_path, "qwen3_moe"), router_aux_loss_coef=0.01)
    check_engine(ACTOR, role("fsdp"), mixture, "lm", "cpu")
    with pytest.raises(ValueError, match=r"strategy=megatron knows llama, qwen2, qwen3, not qwen3_moe; strategy=fsdp takes"):
        check_engine(ACTOR, role("megatron"), mixture, "lm", "cpu")
