"""vLLM with a LoRA adapter that comes alone: its answers, what it holds, what it refuses. Over two ranks: ../test_ranks.py."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.workers.rollout.adapters import AdapterSource
from tests.workers.rollout.engines import (
    load_unspoiled,
    log_prob_error,
    one_off,
    ragged_prompts,
    request,
    spec_of,
    spoil_loading,
)
from tests.workers.rollout.vllm_workers import CPU_BUILD, LENGTH, greedy_errors, make_small, place
from workers.metric import plain_numbers
from workers.roles.rollout_engines import make_rollout
from workers.roles.worker import Worker
from workers.rollout.base import EngineAsleep, RolloutSpec
from workers.rollout.sync.weight_sync import WeightSync
from workers.rollout.verification import WeightMismatch
from workers.rollout.vllm.vllm_engine import VLLMRollout

pytestmark = CPU_BUILD
ADAPTERS: dict[str, dict[str, Any]] = {
    "all layers": {"lora_rank": 8, "lora_alpha": 32.0, "target_modules": "all-linear"},
    "two layers of three that vLLM has as one": {"lora_rank": 4, "lora_alpha": 8.0, "target_modules": ["q_proj", "v_proj"]},
}
SIZES = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker(place(), "cpu", 600.0)
    yield worker
    worker.close()


class Case:
    """An engine, a trainer, and the sync between them."""

    def __init__(self, worker: Worker, path: Path, lora: dict[str, Any], architecture: str, tied: bool) -> None:
        model = make_small(path, architecture, tie_word_embeddings=tied, **SIZES)
        self.spec = spec_of(str(path), name="vllm", max_model_len=LENGTH, slots=16, lora=lora, lora_sync="adapter")
        self.source = AdapterSource(model, self.spec.model)
        self.engine = cast(VLLMRollout, make_rollout(self.spec, worker.info))

    def sync(self, mode: str = "full") -> WeightSync:
        config = replace(self.spec.rollout, verify_weights=cast(Any, mode))
        return WeightSync(self.engine, cast(Any, self.source), config, rank=0)


FIRST, OTHER = zip(ADAPTERS, ["qwen2", "qwen3"], [False, True], strict=True)


@pytest.fixture(scope="module", params=[FIRST, pytest.param(OTHER, marks=pytest.mark.soak)], ids=lambda param: param[0])
def shared(request: pytest.FixtureRequest, worker: Worker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    name, architecture, tied = request.param
    case = Case(worker, tmp_path_factory.mktemp("model"), ADAPTERS[name], architecture, tied)
    yield case
    case.engine.close()


@pytest.fixture
def case(shared: Case) -> Iterator[Case]:
    """With another adapter than the test before had."""
    shared.engine.wake(weights=True, kv_cache=True)
    shared.source.change(100)
    shared.source.given.clear()
    yield shared
    load_unspoiled(shared.engine)
    shared.engine.abort()


PROMPTS = [
    *ragged_prompts(5),
    *ragged_prompts(2, longest=200, seed=3),
]  # more than a block of the cache: a prefix outlives nothing


def test_greedy_answers_are_the_merged_models_after_each_round(case: Case) -> None:
    """Of a new adapter, sleep and sync. The base weights come once."""
    sync, answers = case.sync(), []
    for version in range(3):
        case.source.change(version)
        sync(version)
        case.engine.wake(weights=False, kv_cache=True)
        assert max(greedy_errors(case.source.merged(), case.engine, PROMPTS)) < 1e-5
        answers.append([c.token_ids for c in case.engine.generate([request(0, PROMPTS[0]), request(1, PROMPTS[-1])])])
        case.engine.sleep()
        case.engine.wake(weights=True, kv_cache=False)
    assert case.source.given == ["full", "full", "adapter", "adapter", "adapter"], "once to load, once to verify; then not again"
    assert answers[0] != answers[1] != answers[2] != answers[0]


def test_running_responses_continue_with_the_new_adapter(case: Case) -> None:
    """What they have is computed anew: keys and values of the old adapter are gone."""
    sync = case.sync("off")
    sync(1)
    asked = request(0, PROMPTS[-1], temperature=0.0, stop_token_ids=(), max_tokens=12)
    before = case.engine.generate([asked])[0]
    case.engine.submit([asked])
    for _ in range(5):
        assert case.engine.step() == []
    case.source.change(101)
    sync(2)
    (after,) = [completion for _ in range(20) for completion in case.engine.step()]
    assert after.token_ids[:3] == before.token_ids[:3] and after.versions[-1] == 2
    grown = replace(asked, prompt_ids=(*asked.prompt_ids, *after.token_ids[:8]), sampling=replace(asked.sampling, max_tokens=4))
    rest = case.engine.generate([grown])[0]
    assert rest.token_ids == after.token_ids[8:]
    assert log_prob_error(case.source.merged(), grown, replace(rest, log_probs=after.log_probs[8:])) < 1e-5


def test_an_adapter_that_did_not_arrive_ends_the_run(case: Case) -> None:
    sync = case.sync("sample")
    sync(1)
    case.source.change(102)
    case.engine.load_adapter = lambda config, weights, version: None  # type: ignore[method-assign]
    with pytest.raises(WeightMismatch, match=r"lora_[AB]\.weight in vllm on rank 0 is not the trainer's, weights of version 2: "):
        sync(2)


def test_one_number_of_an_adapter_that_is_off_is_named(case: Case) -> None:
    sync = case.sync("sample")
    weights = case.source.weights()
    for name in weights:
        for index in (0, -1):
            spoil_loading(case.engine, one_off(name, index))
            with pytest.raises(WeightMismatch) as error:
                sync(3)
            assert str(error.value).startswith(f"{name} in vllm on rank 0 is not the trainer's, weights of version 3: 1 of ")
    load_unspoiled(case.engine)
    read = plain_numbers(sync(4)[1])["rollout/verified_bytes"]
    rank, room = case.spec.model.lora_rank, 8
    assert read == sum(weight.nbytes for weight in weights.values()) * room / rank, "all of it, with vLLM's padding"


def test_base_weights_of_an_adapter_are_verified_completely(case: Case) -> None:
    """They come once: a sample's other parts would never be read."""
    for index in (0, -1):
        spoil_loading(case.engine, one_off("model.layers.1.self_attn.v_proj.weight", index))
        with pytest.raises(WeightMismatch, match=r"v_proj\.weight in vllm on rank 0"):
            case.sync("sample")(1)
    load_unspoiled(case.engine)
    case.sync("sample")(2)


def test_weights_that_do_not_fit_are_named(case: Case) -> None:
    case.sync()(1)
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


def test_loading_leaves_the_trainers_tensors_alone(case: Case) -> None:
    """vLLM multiplies B by the scaling in its place."""
    before = {name: weight.clone() for name, weight in case.source.weights().items()}
    case.sync("off")(1)
    assert all(torch.equal(weight, before[name]) for name, weight in case.source.weights().items())


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


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (2, 8), (8, 8), (33, 64), (512, 512)])
def test_the_room_is_the_next_rank_that_vllm_knows(rank: int, room: int, tmp_path: Path) -> None:
    from workers.rollout.vllm.vllm_lora import ExpectedAdapter

    arguments = ExpectedAdapter(spec_with_rank(tmp_path, rank).model).arguments()
    assert (arguments["max_lora_rank"], arguments["lora_target_modules"]) == (room, ["q_proj"])


def test_a_rank_that_vllm_has_no_room_for_is_refused(tmp_path: Path) -> None:
    from workers.rollout.vllm.vllm_lora import ExpectedAdapter

    with pytest.raises(
        ValueError, match=r"lora_sync=adapter: vLLM takes adapters of rank 512 at most, and this one has 513; set"
    ):
        ExpectedAdapter(spec_with_rank(tmp_path, 513).model)


def spec_with_rank(path: Path, rank: int) -> RolloutSpec:
    make_small(path)
    return spec_of(str(path), lora={"lora_rank": rank, "target_modules": ["q_proj"]})


def test_a_mixture_of_experts_is_refused_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would fail in its first step: with an adapter its experts are Triton's."""
    from vllm.model_executor.layers.fused_moe import MoERunner

    from workers.rollout.vllm.vllm_cpu import CPUWorker, SleepingWorker

    monkeypatch.setattr(CPUWorker, "load_model", lambda self: None)
    worker: Any = object.__new__(SleepingWorker)
    worker.vllm_config = SimpleNamespace(lora_config="one")
    worker.model_runner = SimpleNamespace(model=torch.nn.ModuleList([object.__new__(MoERunner)]))
    with pytest.raises(ValueError, match=r"lora_sync=adapter: on CPU vLLM has no adapters for a mixture of experts; set"):
        worker.load_model()
