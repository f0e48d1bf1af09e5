"""A LoRA adapter in the engine, against peft's own around a plain transformers model."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from tests.workers.engine.fsdp.cases import exported, shards, train, training_batch
from tests.workers.engine.toy import (
    ToyLoss,
    ValueLoss,
    cut,
    distance,
    plain_loss,
    plain_model,
    plain_outputs,
    toy_batch,
    toy_engine,
)
from workers.batch import Batch
from workers.engine.fsdp.fsdp_engine import FSDPEngine
from workers.engine.fsdp.sharding import full

RANK = 3
LENGTHS = [30, 1, 17, 9, 2]


def lora_engine(path: str, head: str = "lm", **changes: Any) -> FSDPEngine:
    return toy_engine(path, head, **({"lora_rank": RANK, "lora_alpha": 6.0} | changes))


def adapter_of(engine: FSDPEngine) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in engine.export_weights(kind="adapter")}


def saved_adapter(engine: FSDPEngine, folder: Path) -> str:
    """A directory of peft's with the engine's adapter."""
    assert engine.adapter_config is not None
    engine.adapter_config.save_pretrained(str(folder))
    save_file(adapter_of(engine), folder / "adapter_model.safetensors")
    return str(folder)


def log_probs(engine: FSDPEngine, batch: Batch, *, adapter: bool = True) -> Tensor:
    (share,), (plan,) = cut(batch, 1, max_tokens=40)
    found = engine.forward(share, plan, {"log_probs"}, adapter=adapter)
    assert found is not None
    return found.tokens["log_probs"]


@torch.no_grad()
def plain_log_probs(model: torch.nn.Module, batch: Batch) -> Tensor:
    """Of every token, 0 where the response mask is not set."""
    rows = [torch.cat([torch.zeros(1), plain_outputs(model, ids, 0.7)[0]]) for ids in batch.split_rows("input_ids")]
    return torch.cat(rows) * batch.tokens["response_mask"]


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_a_new_adapter_is_the_base_and_a_trained_one_is_pefts(
    group: None, models: dict[str, str], tmp_path: Path, architecture: str
) -> None:
    engine, batch, base = lora_engine(models[architecture]), toy_batch(LENGTHS), plain_model(models[architecture])
    begin = plain_log_probs(base, batch)
    assert torch.equal(log_probs(engine, batch), log_probs(engine, batch, adapter=False))
    assert (log_probs(engine, batch) - begin).abs().max() < 1e-5
    train(engine, range(3))
    assert (log_probs(engine, batch, adapter=False) - begin).abs().max() < 1e-5, "the reference"
    expected = PeftModel.from_pretrained(base, saved_adapter(engine, tmp_path)).eval()
    assert (log_probs(engine, batch) - plain_log_probs(expected, batch)).abs().max() < 1e-5
    assert (log_probs(engine, batch) - begin).abs().max() > 1e-3


def test_merged_weights_equal_pefts_bitwise(group: None, models: dict[str, str], tmp_path: Path) -> None:
    engine = lora_engine(models["qwen2"])
    before = exported(engine)
    train(engine, range(2))
    base = {name: weight.clone() for name, weight in engine.export_weights(kind="full")}
    plain = AutoModelForCausalLM.from_pretrained(models["qwen2"])
    expected = PeftModel.from_pretrained(plain, saved_adapter(engine, tmp_path)).merge_and_unload()
    merged = exported(engine)
    assert all(torch.equal(weight, expected.get_parameter(name)) for name, weight in merged.items())
    assert base.keys() == merged.keys() == dict(expected.named_parameters()).keys()
    changed = {name for name in merged if not torch.equal(merged[name], base[name])}
    assert changed == {name for name in merged if name.endswith("_proj.weight")}
    assert all(torch.equal(base[name], before[name]) for name in base), "nothing is added in place"
    engine.export_hf(str(tmp_path / "hf"))
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert all(torch.equal(param, merged[name]) for name, param in whole.named_parameters())


def test_merged_in_float32_before_it_is_cast(group: None, models: dict[str, str]) -> None:
    """A step of the adapter is often smaller than a step between two numbers in bfloat16."""
    engine = lora_engine(models["qwen2"], model_dtype="bfloat16", dtype="bfloat16")
    train(engine, range(1))
    name = "model.layers.0.mlp.up_proj.weight"
    wide, base = exported(engine)[name], dict(engine.export_weights(kind="full"))[name]
    narrow = dict(engine.export_weights(dtype=torch.bfloat16))[name]
    assert (base.dtype, wide.dtype, narrow.dtype) == (torch.bfloat16, torch.float32, torch.bfloat16)
    assert not torch.equal(wide, wide.bfloat16().float()) and torch.equal(narrow, wide.bfloat16())


def test_gradients_are_pefts(group: None, models: dict[str, str], tmp_path: Path) -> None:
    engine = lora_engine(models["qwen2"])
    train(engine, range(2))
    expected = PeftModel.from_pretrained(plain_model(models["qwen2"]), saved_adapter(engine, tmp_path), is_trainable=True).eval()
    batch = toy_batch(LENGTHS)
    plain_loss(expected, batch)
    (share,), (plan,) = cut(batch, 1, max_rows=2)
    engine.accumulate(share, plan, ToyLoss())
    assert engine._adapter is not None
    actual = {name: full(weight.grad).clone() for name, weight in engine._adapter.own.items() if weight.grad is not None}
    wanted = {name.replace(".default.", "."): p.grad for name, p in expected.named_parameters() if p.grad is not None}
    assert len(actual) == 28 and distance(actual, wanted) < 1e-6
    assert all((param.grad is None) == (".lora_" not in name) for name, param in engine._params.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_that_was_off_first_is_trained(group: None, models: dict[str, str], dtype: str) -> None:
    """FSDP, which is there on one rank for bfloat16, looks at what is frozen when it gathers for the first time."""
    engine = lora_engine(models["qwen2"], dtype=dtype, model_dtype=dtype)
    log_probs(engine, toy_batch(LENGTHS), adapter=False)
    before = adapter_of(engine)
    train(engine, range(1))
    after = adapter_of(engine)
    assert all(not torch.equal(after[name], before[name]) for name in after if ".lora_B." in name)
    log_probs(engine, toy_batch(LENGTHS), adapter=False)
    train(engine, range(1, 2))
    assert all(not torch.equal(weight, after[name]) for name, weight in adapter_of(engine).items())


def test_an_adapter_is_on_again_after_a_forward_that_failed(group: None, models: dict[str, str]) -> None:
    engine, batch = lora_engine(models["qwen2"]), toy_batch(LENGTHS)
    with pytest.raises(KeyError, match="temperature"):
        engine.forward(replace(batch, meta={}), ((0,),), {"log_probs"}, adapter=False)
    before = adapter_of(engine)
    train(engine, range(1))
    assert all(not torch.equal(weight, before[name]) for name, weight in adapter_of(engine).items() if ".lora_B." in name)


def test_only_the_adapter_is_trained_and_in_float32(group: None, models: dict[str, str]) -> None:
    engine = lora_engine(models["qwen2"], dtype="bfloat16", model_dtype="bfloat16")
    own = {name for name in engine._params if ".lora_" in name}
    assert len(own) == 28
    assert {engine._params[name].dtype for name in own} == {torch.float32}
    assert {engine._params[name].dtype for name in engine._params.keys() - own} == {torch.bfloat16}
    assert {name for name, param in engine._params.items() if param.requires_grad} == own
    assert engine._optimizer is not None and {name for _, name in engine._optimizer.moments()} == own
    assert engine.live_weights() is None, "an engine that shares them would answer with the base"
    reference = lora_engine(models["qwen2"], optimizer=None)
    assert not any(param.requires_grad for param in reference._params.values())
    log_probs(reference, toy_batch(LENGTHS), adapter=False)
    assert not any(param.requires_grad for param in reference._params.values())


@pytest.mark.parametrize(
    "changes", [{"enable_gradient_checkpointing": True}, {"optimizer_offload": True}], ids=["recomputed", "offloaded"]
)
def test_options_give_the_same_bits(group: None, models: dict[str, str], changes: dict[str, Any]) -> None:
    found = []
    for options in ({}, changes):
        engine = lora_engine(models["qwen2"], **options)
        train(engine, range(2))
        found.append(shards(engine))
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


def test_an_adapter_is_drawn_from_its_seed_alone(group: None, models: dict[str, str]) -> None:
    before = torch.get_rng_state()
    one = adapter_of(lora_engine(models["qwen2"]))
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    again = adapter_of(lora_engine(models["qwen2"]))
    assert all(torch.equal(weight, again[name]) for name, weight in one.items())
    drawn = [weight for name, weight in one.items() if ".lora_A." in name]
    assert all(weight.any() for weight in drawn) and not torch.equal(drawn[0], drawn[1])
    assert not any(weight.any() for name, weight in one.items() if ".lora_B." in name)


@pytest.mark.parametrize("head", ["lm", "value"])
def test_adapter_checkpoint_resumes_bitwise(group: None, models: dict[str, str], tmp_path: Path, head: str) -> None:
    loss = ToyLoss() if head == "lm" else ValueLoss()
    engine = lora_engine(models["qwen2"], head)
    train(engine, range(2), loss)
    files = {file.name for file in engine.save(str(tmp_path / "lora")).result().files}
    assert files >= {"adapter_config.json", "config.json"}
    resumed = lora_engine(models["qwen2"], head)
    resumed.load(str(tmp_path / "lora"))
    found = [train(one, range(2, 4), loss) for one in (engine, resumed)]
    assert all(torch.equal(column, found[1][name]) for name, column in found[0].items())
    assert all(torch.equal(tensor, shards(resumed)[name]) for name, tensor in shards(engine).items())
    toy_engine(models["qwen2"], head).save(str(tmp_path / "full"))
    sizes = [sum(file.stat().st_size for file in (tmp_path / kind).glob("*.safetensors")) for kind in ("lora", "full")]
    assert sizes[0] < sizes[1] / 3


@pytest.mark.parametrize(
    ("saved", "loaded", "reported"),
    [
        ({"lora_rank": 2}, {}, r"lora_A.weight is \(2, 32\) there and \(3, 32\) in this model"),
        (
            {},
            {"target_modules": ["q_proj", "v_proj"]},
            "in this checkpoint, and not in this model: its adapter has other modules",
        ),
        ({"target_modules": ["q_proj"]}, {}, "no adapter.base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight in this"),
        ({"lora_rank": 0}, {}, "no adapter.base_model"),
        ({}, {"lora_rank": 0}, "no model.model.embed_tokens.weight in this checkpoint: it is another model's"),
    ],
    ids=["rank", "fewer", "more", "full", "adapter"],
)
def test_a_checkpoint_of_another_model_is_refused(
    group: None, models: dict[str, str], tmp_path: Path, saved: dict[str, Any], loaded: dict[str, Any], reported: str
) -> None:
    lora_engine(models["qwen2"], **saved).save(str(tmp_path))
    with pytest.raises(ValueError, match=reported) as raised:
        lora_engine(models["qwen2"], **loaded).load(str(tmp_path))
    assert "\n" not in str(raised.value)


def test_an_engine_begins_with_an_adapter_from_disk(group: None, models: dict[str, str], tmp_path: Path) -> None:
    engine = lora_engine(models["qwen2"], target_modules=["q_proj", "down_proj"])
    train(engine, range(2))
    folder = saved_adapter(engine, tmp_path)
    begun = toy_engine(models["qwen2"], lora_adapter_path=folder)
    assert begun.adapter_config == engine.adapter_config
    assert all(torch.equal(weight, adapter_of(engine)[name]) for name, weight in adapter_of(begun).items())
    merged = exported(engine)
    assert all(torch.equal(weight, merged[name]) for name, weight in exported(begun).items())


def test_a_critic_trains_its_head_and_the_adapter(group: None, models: dict[str, str], tmp_path: Path) -> None:
    engine = lora_engine(models["qwen2"], "value", dtype="bfloat16", model_dtype="bfloat16")
    head = {name: weight for name, weight in adapter_of(engine).items() if ".lora_" not in name}
    assert head.keys() == {"base_model.model.score.weight", "base_model.model.score.bias"}
    assert not any(weight.any() for weight in head.values()), "values are 0 until the first update"
    train(engine, range(3), ValueLoss())
    trained = adapter_of(engine)
    assert all(weight.dtype == torch.float32 and weight.any() for weight in trained.values())
    folder = saved_adapter(engine, tmp_path)
    base = AutoModelForTokenClassification.from_pretrained(models["qwen2"], num_labels=1)
    expected = PeftModel.from_pretrained(base, folder).merge_and_unload()
    assert torch.equal(expected.score.weight, trained["base_model.model.score.weight"])
    again = toy_engine(models["qwen2"], "value", lora_adapter_path=folder)
    assert all(torch.equal(weight, trained[name]) for name, weight in adapter_of(again).items())


def test_flops_of_what_is_frozen(group: None, models: dict[str, str]) -> None:
    """No gradient of its own: 4 a parameter and token instead of 6."""
    lengths, tokens = [10, 7], 17
    engine, plain = lora_engine(models["qwen2"]), toy_engine(models["qwen2"])
    own = sum(weight.numel() for weight in adapter_of(engine).values())
    frozen = sum(weight.numel() for weight in exported(plain).values()) - 61 * 32
    assert engine.flops(lengths, backward=False) == plain.flops(lengths, backward=False) + 2 * own * tokens
    assert engine.flops(lengths, backward=True) == plain.flops(lengths, backward=True) + 6 * own * tokens - 2 * frozen * tokens


def test_two_ranks_train_the_adapter_that_one_does(
    two_ranks: tuple[Path, list[dict[str, Any]]], models: dict[str, str], group: None
) -> None:
    """The adapter was off at first. Exports are whole on both."""
    engine = lora_engine(models["qwen3"])
    found = train(engine, range(3))
    mine: dict[str, Callable[[], dict[str, Tensor]]] = {
        "merged": lambda: exported(engine),
        "full": lambda: dict(engine.export_weights(kind="full")),
        "adapter": lambda: adapter_of(engine),
    }
    for rank in two_ranks[1]:
        expected = rank["lora"]
        assert torch.allclose(expected["grad_norm"], found["grad_norm"], rtol=1e-5)
        for kind, weights in mine.items():
            assert distance(expected[kind], weights()) < 1e-5, kind
        assert all(torch.equal(weight, two_ranks[1][0]["lora"]["resumed"][name]) for name, weight in expected["adapter"].items())


def test_an_adapter_over_cut_tokens(two_ranks: tuple[Path, list[dict[str, Any]]], models: dict[str, str], group: None) -> None:
    """Ulysses: gradients of the adapter that two ranks have trained are those of one rank."""
    path, ranks = two_ranks
    engine, batch = lora_engine(models["qwen3"]), training_batch(5)
    engine.load(str(path / "lora"))
    engine.accumulate(batch, cut(batch, max_tokens=80)[1][0], ToyLoss())
    assert engine._adapter is not None
    wanted = {name: full(weight.grad).clone() for name, weight in engine._adapter.own.items() if weight.grad is not None}
    assert len(wanted) == 28
    for rank in ranks:
        assert distance(rank["lora"]["gradients of cut tokens"], wanted) < 1e-6
