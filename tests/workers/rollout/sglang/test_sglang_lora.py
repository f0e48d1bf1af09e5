"""SGLang with a LoRA adapter that comes alone: its answers, what its ranks hold, and what it refuses."""

import inspect
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer

from configs.validation.rollout import TAKEN_SGLANG_ARGUMENTS
from tests.workers.rollout.adapters import AdapterSource
from tests.workers.rollout.engines import load_unspoiled, one_off, ragged_prompts, request, spec_of, spoil_loading
from tests.workers.rollout.sglang.test_sglang_engine_arguments import Recorder
from tests.workers.rollout.vllm_workers import CPU_BUILD, LENGTH, greedy_errors, make_small, place
from workers.metric import plain_numbers
from workers.roles.rollout_engines import make_rollout
from workers.rollout.base import EngineAsleep, RolloutSpec
from workers.rollout.sglang.sglang_cpu import PageableMemory
from workers.rollout.sglang.sglang_engine import SGLangRollout
from workers.rollout.sglang.sglang_lora import AdapterInSGLang, block_and_layer
from workers.rollout.sync.weight_sync import WeightSync
from workers.rollout.verification import WeightMismatch

pytestmark = CPU_BUILD
SIZES = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
EVERYWHERE = {"lora_rank": 8, "lora_alpha": 32.0, "target_modules": "all-linear"}
PARTS = {"lora_rank": 4, "lora_alpha": 8.0, "target_modules": ["q_proj", "up_proj", "down_proj"]}
PROMPTS = [*ragged_prompts(4), *ragged_prompts(1, longest=200, seed=3)]


class Case:
    """An engine over two ranks, a trainer, and the sync between them."""

    def __init__(self, path: Path) -> None:
        self.model = make_small(path, tie_word_embeddings=True, **SIZES)
        self.take(EVERYWHERE)
        engine = make_rollout(self.spec, replace(place(), world_size=2))
        assert isinstance(engine, SGLangRollout)
        self.engine = engine

    def take(self, lora: dict[str, Any]) -> None:
        self.spec = spec_with(str(self.model.config._name_or_path), lora)
        self.source = AdapterSource(self.model, self.spec.model)

    def sync(self, mode: str = "sample") -> WeightSync:
        config = replace(self.spec.rollout, verify_weights=cast(Any, mode))
        return WeightSync(self.engine, cast(Any, self.source), config, rank=0)

    def error(self) -> float:
        return max(greedy_errors(self.source.merged(), self.engine, PROMPTS))


def spec_with(path: str, lora: dict[str, Any]) -> RolloutSpec:
    return spec_of(
        path, name="sglang", max_model_len=LENGTH, slots=16, tensor_model_parallel_size=2, lora=lora, lora_sync="adapter"
    )


@pytest.fixture(scope="module", params=[pytest.param(None, id="sglang", marks=pytest.mark.soak)])
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    case = Case(tmp_path_factory.mktemp("model"))
    yield case
    case.engine.close()


@pytest.fixture
def case(shared: Case) -> Iterator[Case]:
    """Awake, and with another adapter than the test before had."""
    shared.engine.wake(weights=True, kv_cache=True)
    shared.source.change(100)
    shared.source.given.clear()
    yield shared
    load_unspoiled(shared.engine)
    shared.engine.abort()


@pytest.fixture
def in_parts(case: Case) -> Iterator[Case]:
    """The same engine, with an adapter in some layers of those that it has room for, of a lower rank."""
    everywhere, case.engine.adapter = case.engine.adapter, AdapterInSGLang(spec_with(case.spec.model.path, PARTS).model)
    case.take(PARTS)
    yield case
    case.engine.adapter = everywhere
    case.take(EVERYWHERE)


def test_greedy_answers_are_the_merged_models_after_each_round(case: Case) -> None:
    """Of a new adapter, sleep and sync. The base weights come once."""
    sync, answers = case.sync("full"), []
    for version in range(3):
        case.source.change(version)
        sync(version)
        case.engine.wake(weights=False, kv_cache=True)
        assert case.error() < 1e-5
        answers.append([c.token_ids for c in case.engine.generate([request(i, prompt) for i, prompt in enumerate(PROMPTS)])])
        case.engine.sleep()
        case.engine.wake(weights=True, kv_cache=False)
    assert case.source.given == ["full", "full", "adapter", "adapter", "adapter"], "once to load, once to verify; then not again"
    assert answers[0] != answers[1] != answers[2] != answers[0]


def test_an_adapter_in_parts_of_what_sglang_has_as_one(in_parts: Case) -> None:
    sync = in_parts.sync()
    for version in range(2):
        in_parts.source.change(version)
        sync(version)
        assert in_parts.error() < 1e-5


def test_running_responses_continue_with_the_new_adapter(case: Case) -> None:
    """What they have is computed anew: keys and values of the old adapter are gone."""
    sync = case.sync("off")
    sync(1)
    asked = request(0, PROMPTS[-1], temperature=0.0, ignore_eos=True, max_tokens=40)
    short = replace(request(1, PROMPTS[0], temperature=0.0, ignore_eos=True, max_tokens=2))
    before = case.engine.generate([asked])[0]
    case.engine.submit([asked, short])
    assert [completion.id for completion in case.engine.step()] == [1]
    case.source.change(101)
    sync(2)
    (after,) = case.engine.step()
    kept = next(i for i in range(40) if after.token_ids[i] != before.token_ids[i])
    grown = replace(
        asked, prompt_ids=(*asked.prompt_ids, *after.token_ids[:kept]), sampling=replace(asked.sampling, max_tokens=1)
    )
    assert case.engine.generate([grown])[0].token_ids == after.token_ids[kept : kept + 1] and after.versions[-1] == 2


def test_an_adapter_that_did_not_arrive_ends_the_run(case: Case) -> None:
    sync = case.sync()
    sync(1)
    case.source.change(102)
    case.engine.load_adapter = lambda config, weights, version: None  # type: ignore[method-assign]
    with pytest.raises(
        WeightMismatch, match=r"lora_[AB]\.weight in sglang on rank 0 is not the trainer's, weights of version 2: "
    ):
        sync(2)


def test_one_number_of_an_adapter_that_is_off_is_named(case: Case) -> None:
    sync, weights = case.sync(), case.source.weights()
    sync(1)
    for name in (name for name in weights if ".layers.1." in name):
        for index in (0, -1):
            spoil_loading(case.engine, one_off(name, index))
            with pytest.raises(WeightMismatch) as error:
                sync(3)
            assert str(error.value).startswith(f"{name} in sglang on rank 0 is not the trainer's, weights of version 3: 1 of ")
    load_unspoiled(case.engine)
    read = plain_numbers(sync(4)[1])["rollout/verified_bytes"]
    assert read == sum(weight.nbytes for weight in weights.values()), "all of it"


def test_weights_that_do_not_fit_are_named(case: Case) -> None:
    case.sync("off")(1)
    weights = dict(case.source.weights())
    first, second, *_ = weights
    weights["base_model.model.extra.lora_A.weight"] = weights.pop(first)
    weights[second] = weights[second][:3]
    with pytest.raises(ValueError) as error:
        case.engine.load_adapter(case.source.adapter_config, iter(weights.items()), 2)
    missing, unexpected = str(error.value).split("unexpected")
    assert first in missing and "extra" in unexpected and f"{second} (3, " in unexpected
    with pytest.raises(EngineAsleep, match="no weights"):
        case.engine.generate([request(0, (2, 3))])


def test_what_sglang_refuses_is_raised_and_the_next_sync_is_its_own(case: Case) -> None:
    """It says so in its result, and continues with the adapter that it has under that name."""
    sync = case.sync()
    sync(1)
    engine, adapter = case.engine.engine, case.engine.adapter
    assert engine is not None and adapter is not None
    too_large = {**adapter.sglang_config(case.source.adapter_config), "r": 99}
    with pytest.raises(RuntimeError, match=r"SGLang failed in load_adapter:(.|\n)*rank 99 is incompatible"):
        engine.call("load_adapter", too_large, torch.zeros(1), [])
    with pytest.raises(RuntimeError, match=r"SGLang failed in take_adapter:(.|\n)*not brought the adapter of old to this rank"):
        engine.ranks[-1].call("take_adapter", "of old", adapter.places, 2)
    sync(2)
    assert case.error() < 1e-5


def test_no_answers_without_a_sync_after_sleep(case: Case) -> None:
    """The weights are there, and the old adapter."""
    sync = case.sync()
    sync(1)
    case.engine.sleep()
    with pytest.raises(EngineAsleep, match="load_adapter: the weights are asleep"):
        case.engine.load_adapter(case.source.adapter_config, iter(()), 2)
    case.engine.wake(weights=True, kv_cache=True)
    with pytest.raises(EngineAsleep, match="no weights since it was made or woke"):
        case.engine.generate([request(0, (2, 3))])
    case.engine.abort()
    sync(2)
    assert case.engine.generate([request(0, (2, 3))])[0].versions[-1] == 2


def test_no_answers_without_an_adapter_and_no_adapter_without_weights(case: Case) -> None:
    weights = dict(case.source.base.named_parameters())
    case.engine.load_weights(iter(weights.items()), 1)
    with pytest.raises(EngineAsleep, match="no weights"):
        case.engine.generate([request(0, (2, 3))])
    case.engine.abort()
    with pytest.raises(ValueError, match="do not fit"):
        case.engine.load_weights(iter(()), 2)
    with pytest.raises(EngineAsleep, match="load_adapter: the engine has no base weights for an adapter"):
        case.engine.load_adapter(case.source.adapter_config, iter(case.source.weights().items()), 2)


def test_other_ranks_of_a_replica_take_part(tmp_path: Path) -> None:
    """And have nothing that could be read."""
    model, spec = make_small(tmp_path, **SIZES), spec_with(str(tmp_path), EVERYWHERE)
    source = AdapterSource(model, spec.model)
    other = make_rollout(spec, replace(place(), rank=1, local_rank=1, world_size=2))
    assert isinstance(other, SGLangRollout) and other.engine is None and other.keeps_weights
    WeightSync(other, cast(Any, source), spec.rollout, rank=1)(1)
    weights = iter(source.weights().items())
    other.load_adapter(source.adapter_config, weights, 2)
    assert next(weights, None) is None, "the export is collective: every rank draws from it to its end"
    assert other.generate([request(0, (2, 3))]) == []


def test_a_model_without_an_adapter_gives_whole_weights(tmp_path: Path) -> None:
    make_small(tmp_path)
    other = make_rollout(spec_with(str(tmp_path), {}), replace(place(), rank=1, local_rank=1, world_size=2))
    assert isinstance(other, SGLangRollout) and other.adapter is None and not other.keeps_weights


def test_adapter_config_for_sglang(tmp_path: Path) -> None:
    make_small(tmp_path, **SIZES)
    adapter = AdapterInSGLang(spec_with(str(tmp_path), PARTS).model)
    arguments = adapter.arguments("cuda")
    assert arguments.keys() <= TAKEN_SGLANG_ARGUMENTS
    assert (arguments["max_lora_rank"], arguments["enable_weights_cpu_backup"]) == (4, True)
    assert arguments["lora_target_modules"] == ["down_proj", "gate_proj", "k_proj", "q_proj", "up_proj", "v_proj"]
    assert not adapter.arguments("cpu")["enable_weights_cpu_backup"], "there is no memory saver on CPU"
    prefix = "base_model.model.model.layers.1."
    assert adapter.zeros[f"{prefix}self_attn.k_proj.lora_B.weight"] == (64, 4)
    assert adapter.zeros[f"{prefix}mlp.gate_proj.lora_A.weight"] == (4, 128)
    assert len(adapter.expected.shapes) == len(adapter.places) == len(adapter.zeros) == 2 * 3 * 2
    place = adapter.places[f"{prefix}mlp.up_proj.lora_B.weight"]
    assert (place.layer, place.side, place.part) == ("model.layers.1.mlp.gate_up_proj", "B", 1)


@pytest.mark.parametrize("use_rslora", [False, True])
def test_the_scaling_is_pefts(use_rslora: bool, tmp_path: Path) -> None:
    model, spec = make_small(tmp_path, **SIZES), spec_with(str(tmp_path), PARTS)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], use_rslora=use_rslora)
    layer = next(module for module in get_peft_model(model, config).modules() if isinstance(module, LoraLayer))
    reported = AdapterInSGLang(spec.model).sglang_config(config)
    assert reported["lora_alpha"] / reported["r"] == layer.scaling["default"] == (4.0 if use_rslora else 2.0)


def test_layers_that_sglang_takes_no_adapter_of_are_named() -> None:
    with pytest.raises(
        ValueError, match=r"lora_sync=adapter: SGLang takes q_proj, .* and not model\.layers\.3\.mlp\.gate\.lora_A"
    ):
        block_and_layer("base_model.model.model.layers.3.mlp.gate.lora_A.weight")


@pytest.mark.parametrize(
    ("changes", "ranks", "message"),
    [
        ({}, 2, None),
        ({"num_key_value_heads": 1}, 2, "qkv_proj if num_key_value_heads is a multiple of 2, and it is 1; set lora_sync=merged"),
        (
            {"intermediate_size": 96},
            2,
            "gate_up_proj if intermediate_size is a multiple of 64, and it is 96; set lora_sync=merged",
        ),
        ({"intermediate_size": 96}, 1, None),
        ({"intermediate_size": 100}, 1, "intermediate_size is a multiple of 32, and it is 100"),
    ],
)
def test_layers_that_sglang_makes_larger_on_cpu_are_refused(
    changes: dict[str, int], ranks: int, message: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.rollout.sglang.sglang_engine.Client", Recorder)
    make_small(tmp_path, **(SIZES | changes))
    spec = spec_with(str(tmp_path), PARTS)
    spec = replace(spec, rollout=replace(spec.rollout, tensor_model_parallel_size=ranks))
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        make_rollout(spec, replace(place(), world_size=ranks))


def test_memory_that_cannot_be_pinned_is_ordinary_memory() -> None:
    """torch has none to pin without an accelerator, and SGLang asks for it on CPU too. As torch has them: where Megatron was on
    CPU, factories pin nothing."""
    tensor, zeros = inspect.unwrap(torch.tensor), inspect.unwrap(torch.zeros)
    with pytest.raises(RuntimeError, match="pin"):
        tensor([1, 2], pin_memory=True)
    with PageableMemory():
        assert tensor([1, 2], pin_memory=True).pin_memory().tolist() == [1, 2]
        assert zeros(2, dtype=torch.int32, pin_memory=True).dtype == torch.int32


def test_an_adapter_drops_what_was_computed_with_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When every rank computes with it."""
    monkeypatch.setattr("workers.rollout.sglang.sglang_engine.Client", Recorder)
    model, spec = make_small(tmp_path, **SIZES), spec_with(str(tmp_path), EVERYWHERE)
    engine, source = make_rollout(spec, replace(place(), world_size=2)), AdapterSource(model, spec.model)
    assert isinstance(engine, SGLangRollout) and isinstance(engine.engine, Recorder)
    engine.load_weights(iter(dict(model.named_parameters()).items()), 1)
    engine.engine.calls.clear()
    engine.load_adapter(source.adapter_config, iter(source.weights().items()), 1)
    assert engine.engine.calls == ["load_adapter", "take_adapter", "flush"]
