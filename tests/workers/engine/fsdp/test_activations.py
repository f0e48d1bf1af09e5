"""Layer inputs on the host, and MLPs in pieces: the same gradients, and less kept."""

from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from configs.schema.common import TiledMLPConfig
from tests.tiny import tiny_config
from tests.workers.engine.fsdp.cases import shards, train
from tests.workers.engine.toy import ToyLoss, ValueLoss, cut, distance, gradients, toy_batch, toy_engine
from workers.engine.fsdp.activations import tile_mlps
from workers.engine.fsdp.fsdp_engine import FSDPEngine
from workers.engine.hf.hf_model import PackedModel
from workers.engine.micro_batch import micro_batch

LENGTHS = [4, 30, 1, 17, 30, 2]
TILED = {"tiled_mlp": TiledMLPConfig(enabled=True, num_shards=4)}
HIDDEN = 32


@pytest.mark.parametrize("model", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("recompute", [False, True])
def test_pieces_give_the_same_gradient(group: None, models: dict[str, str], model: str, recompute: bool) -> None:
    (share,), (plan,) = cut(toy_batch(LENGTHS, dtype=torch.float64), 1, max_tokens=50)
    whole, tiled = (
        toy_engine(models[model], dtype="float64", enable_gradient_checkpointing=recompute, **changes) for changes in ({}, TILED)
    )
    assert distance(gradients(tiled, share, plan, ToyLoss()), gradients(whole, share, plan, ToyLoss())) < 1e-10


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gradient_is_summed_over_pieces_in_float32(group: None, models: dict[str, str], dtype: str) -> None:
    """Cut into one token each, bfloat16's own sum would be far off."""
    (share,), (plan,) = cut(toy_batch([200]), 1, max_tokens=200)
    exact = gradients(toy_engine(models["qwen2"], model_dtype="float32"), share, plan, ToyLoss())
    found = []
    for pieces in (1, 200):
        tiled = {"tiled_mlp": TiledMLPConfig(enabled=True, num_shards=pieces)}
        engine = toy_engine(models["qwen2"], dtype=dtype, model_dtype="float32", enable_gradient_checkpointing=True, **tiled)
        found.append(distance(gradients(engine, share, plan, ToyLoss()), exact))
    assert found[1] < (1e-6 if dtype == "float32" else 1.1 * found[0])


@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_inputs_on_the_host_give_the_same_bits(group: None, models: dict[str, str], head: str, dtype: str) -> None:
    loss = ToyLoss() if head == "lm" else ValueLoss()
    found = []
    for offload in (False, True):
        options: dict[str, Any] = {"enable_gradient_checkpointing": True, "enable_activation_offload": offload}
        engine = toy_engine(models["qwen2"], head, dtype=dtype, **options)
        train(engine, range(2), loss)
        found.append(shards(engine))
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


def kept_numbers(engine: FSDPEngine, tokens: int) -> int:
    """Of what a forward keeps for its backward, those that stay on the device."""
    sizes: list[int] = []
    (share,), (plan,) = cut(toy_batch([tokens]), 1, max_rows=1)
    with saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
        engine._run(micro_batch(share, plan[0], torch.device("cpu")), {"log_probs"})
    return sum(sizes)


def test_the_host_gets_each_layers_input(group: None, models: dict[str, str]) -> None:
    here, there = (
        toy_engine(models["qwen2"], enable_gradient_checkpointing=True, enable_activation_offload=offload)
        for offload in (False, True)
    )
    layers, tokens = 2, 60
    assert kept_numbers(here, tokens) - kept_numbers(there, tokens) == layers * tokens * HIDDEN


def test_pieces_keep_the_mlps_input_alone(group: None, models: dict[str, str]) -> None:
    """Nothing of its width I, even where layers are not recomputed: gate, its activation, up and their product, and weights."""
    whole, tiled = (toy_engine(models["qwen2"], **changes) for changes in ({}, TILED))
    layers, tokens, intermediate = 2, 60, 64
    assert kept_numbers(whole, tokens) - kept_numbers(tiled, tokens) > layers * tokens * 4 * intermediate


@pytest.mark.parametrize("recompute", [False, True])
def test_an_mlp_runs_twice(group: None, models: dict[str, str], recompute: bool) -> None:
    """In the forward, and in its own backward: a recomputed layer stops before it."""
    engine = toy_engine(models["qwen2"], enable_gradient_checkpointing=recompute, **TILED)
    runs: list[int] = []
    engine._model.layers[0].mlp.down_proj.register_forward_hook(lambda _module, _given, out: runs.append(out.shape[1]))
    (share,), (plan,) = cut(toy_batch([60]), 1, max_rows=1)
    engine.accumulate(share, plan, ToyLoss())
    assert runs == [15] * 8
    runs.clear()
    engine.forward(share, plan, {"log_probs"})
    assert runs == [15] * 4


def test_frozen_weights_pass_a_gradient_on(group: None, models: dict[str, str]) -> None:
    found = []
    (share,), (plan,) = cut(toy_batch(LENGTHS), 1, max_tokens=100)
    for changes in ({}, TILED):
        engine = toy_engine(models["qwen2"], enable_gradient_checkpointing=True, **changes)
        for layer in engine._model.layers:
            layer.mlp.gate_proj.requires_grad_(False)
            layer.mlp.down_proj.requires_grad_(False)
        engine.accumulate(share, plan, ToyLoss())
        found.append({name: param.grad for name, param in engine._params.items() if param.grad is not None})
    assert found[0].keys() == found[1].keys()
    assert distance(found[1], found[0]) < 1e-6


def test_experts_are_no_such_mlp() -> None:
    config = Qwen3MoeConfig(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, **tiny_config("qwen3").to_diff_dict())
    with torch.device("meta"):
        model = PackedModel(AutoModelForCausalLM.from_config(config, trust_remote_code=False), "lm")
    with pytest.raises(ValueError, match="Qwen3MoeDecoderLayer has no MLP of gate, up and down alone"):
        tile_mlps(model, 4)
