"""SGLang with a LoRA adapter that comes alone: its answers, what its ranks hold, and what it refuses."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from configs.checks_rollout import TAKEN_SGLANG_ARGUMENTS
from tests.workers.rollout.adapters import AdapterSource
from tests.workers.rollout.engines import load_unspoiled, one_off, ragged_prompts, request, spec_of, spoil_loading
from tests.workers.rollout.vllm_hosts import CPU_BUILD, LENGTH, greedy_errors, make_small, place
from workers.metric import plain_numbers
from workers.rollout import make_rollout
from workers.rollout.base import EngineAsleep, RolloutSpec
from workers.rollout.sglang import SGLangRollout
from workers.rollout.sglang_cpu import PageableMemory
from workers.rollout.sglang_lora import FUSED, AdapterInSGLang
from workers.rollout.verification import WeightMismatch
from workers.rollout.weight_sync import WeightSync

pytestmark = CPU_BUILD
SIZES = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
EVERYWHERE = {"lora_rank": 8, "lora_alpha": 32.0, "target_modules": "all-linear"}
PARTS = {"lora_rank": 4, "lora_alpha": 8.0, "target_modules": ["q_proj", "up_proj", "down_proj"]}
PROMPTS = [*ragged_prompts(4), *ragged_prompts(1, longest=200, seed=3)]


class Case:
    """An engine over ``size`` ranks, a trainer, and the sync between them."""

    def __init__(self, path: Path, lora: dict[str, Any], size: int) -> None:
        model = make_small(path, tie_word_embeddings=size == 1, **SIZES)
        self.spec = spec_of(
            str(path), name="sglang", max_model_len=LENGTH, slots=16, tensor_model_parallel_size=size, lora=lora,
            lora_sync="adapter",
        )  # fmt: skip
        self.source = AdapterSource(model, self.spec.model)
        engine = make_rollout(self.spec, replace(place(), world_size=size))
        assert isinstance(engine, SGLangRollout)
        self.engine = engine

    def sync(self, mode: str = "sample") -> WeightSync:
        config = replace(self.spec.rollout, verify_weights=cast(Any, mode))
        return WeightSync(self.engine, cast(Any, self.source), config, rank=0)

    def error(self) -> float:
        return max(greedy_errors(self.source.merged(), self.engine, PROMPTS))


@pytest.fixture(scope="module", params=[(EVERYWHERE, 1), (PARTS, 2)], ids=["everywhere", "in parts, over two ranks"])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    case = Case(tmp_path_factory.mktemp("model"), *request.param)
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


def test_greedy_answers_are_the_merged_models_after_each_round(case: Case) -> None:
    """Of a new adapter, sleep and sync. The weights beside it come once."""
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


def test_running_answers_go_on_with_the_new_adapter(case: Case) -> None:
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
    assert case.engine.generate([grown])[0].token_ids == after.token_ids[kept : kept + 1] and after.weight_version == 2


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
    for name in weights:
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
    """It says so in its result, and goes on with the adapter that it has under that name."""
    sync = case.sync()
    sync(1)
    engine, adapter = case.engine.engine, case.engine.adapter
    assert engine is not None and adapter is not None
    too_large = {**adapter.in_words(case.source.adapter_config), "r": 99}
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
    assert case.engine.generate([request(0, (2, 3))])[0].weight_version == 2


def test_no_answers_without_an_adapter_and_no_adapter_without_weights(case: Case) -> None:
    weights = dict(case.source.base.named_parameters())
    case.engine.load_weights(iter(weights.items()), 1)
    with pytest.raises(EngineAsleep, match="no weights"):
        case.engine.generate([request(0, (2, 3))])
    case.engine.abort()
    with pytest.raises(ValueError, match="do not fit"):
        case.engine.load_weights(iter(()), 2)
    with pytest.raises(EngineAsleep, match="load_adapter: the engine has no weights that it could be beside"):
        case.engine.load_adapter(case.source.adapter_config, iter(case.source.weights().items()), 2)
