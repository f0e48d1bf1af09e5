"""vLLM in the process of the trainer: parity with plain transformers, memory, what leaves no trace, and arguments."""

import os
import random
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from tests.tiny import ARCHITECTURES
from tests.workers.rollout.engines import make_engine, ragged_prompts, request, spec_of
from tests.workers.rollout.vllm_workers import CPU_BUILD, LENGTH, greedy_errors, make_small, place, start
from workers.roles import rollout_engines as engines
from workers.roles.worker import Worker
from workers.rollout.base import RolloutSpec, Sampling
from workers.rollout.vllm.vllm_engine import engine_arguments, sampling_arguments

pytestmark = CPU_BUILD
QUICK = {("qwen3", True)}
"""(architecture, tied embeddings) outside soak: each architecture's start of vLLM takes half a minute."""


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker(place(), "cpu", 600.0)
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return make_small(tmp_path_factory.mktemp("model"))


@torch.no_grad()
def change(model: PreTrainedModel) -> None:
    for weight in model.parameters():
        weight.add_(torch.randn_like(weight) * 0.03)


def states() -> list[Any]:
    return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist(), torch.get_num_threads()]


@pytest.mark.parametrize(
    ("architecture", "tied"),
    [
        pytest.param(
            name, tied, id=f"{name}-{'tied' if tied else 'untied'}", marks=[] if (name, tied) in QUICK else pytest.mark.soak
        )
        for name in ARCHITECTURES
        for tied in (False, True)
    ],
)
def test_greedy_is_generate_before_and_after_weights_change(
    architecture: str, tied: bool, worker: Worker, tmp_path: Path
) -> None:
    """Prompts of more than a block of the cache among them: a prefix that outlived its weights would show."""
    model = make_small(tmp_path, architecture, tie_word_embeddings=tied)
    engine = start(worker, model)
    prompts = [*ragged_prompts(5), *ragged_prompts(2, longest=200, seed=3)]
    try:
        engine.load_weights(model.named_parameters(remove_duplicate=False), 1)
        assert max(greedy_errors(model, engine, prompts)) < 1e-5
        change(model)
        engine.load_weights(model.named_parameters(), 2)
        assert max(greedy_errors(model, engine, prompts)) < 1e-5
        change(model)
        engine.sleep()
        engine.wake(weights=True, kv_cache=False)
        engine.load_weights(model.named_parameters(), 3)
        engine.wake(weights=False, kv_cache=True)
        assert max(greedy_errors(model, engine, prompts)) < 1e-5
    finally:
        engine.close()


def test_the_trainers_generators_and_threads_are_untouched(worker: Worker, model: PreTrainedModel) -> None:
    before, set_threads, environment = states(), torch.set_num_threads, os.environ.get("MASTER_PORT")
    engine = start(worker, model)
    assert states() == before
    engine.load_weights(model.named_parameters(), 1)
    engine.generate([request(i, prompt) for i, prompt in enumerate(ragged_prompts(4))])
    engine.sleep()
    engine.wake(weights=True, kv_cache=True)
    assert states() == before and torch.set_num_threads is set_threads
    engine.close()
    assert dist.is_initialized() and dist.get_world_size() == 1
    assert os.environ.get("MASTER_PORT") == environment


def test_sleep_shows_in_the_memory_of_the_process(worker: Worker, tmp_path: Path) -> None:
    model = make_small(tmp_path, hidden_size=256, num_attention_heads=8, num_key_value_heads=8, num_hidden_layers=8,
                       intermediate_size=1024)  # fmt: skip
    held = sum(weight.nbytes for weight in model.parameters())
    engine = start(worker, model, kv_cache_memory_bytes=192 * 2**20)
    try:
        engine.load_weights(model.named_parameters(), 1)
        expected = engine.generate([request(0, (2, 3, 4), temperature=0.0)])[0]
        for _ in range(2):
            held_cache = engine._on_worker(fill_cache)
            awake = psutil.Process().memory_info().rss
            engine.sleep()
            asleep = psutil.Process().memory_info().rss
            assert awake - asleep > 0.9 * (held + held_cache)
            engine.wake(weights=True, kv_cache=False)
            engine.load_weights(model.named_parameters(), 2)
            engine.wake(weights=False, kv_cache=True)
            assert engine.generate([request(0, (2, 3, 4), temperature=0.0)])[0].token_ids == expected.token_ids
    finally:
        engine.close()


def fill_cache(worker: Any) -> int:
    """The system gives pages when they are first written, and gets back what loading left over. Bytes of the cache."""
    from workers.rollout.vllm.vllm_cpu import trim_free_memory

    trim_free_memory()
    for cache in worker.model_runner.kv_caches:
        cache.fill_(1.0)
    return sum(cache.nbytes for cache in worker.model_runner.kv_caches)


def test_steps_under_way_change_no_draw(worker: Worker, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA: a step begins before the last one's tokens are known, and new weights find one token of an answer in flight."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_and_overlap(config: Any) -> None:
        check(config)
        config.scheduler_config.async_scheduling = True  # vLLM has it off on CPU

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", staticmethod(check_and_overlap))
    requests = [request(i, prompt, ignore_eos=True) for i, prompt in enumerate(ragged_prompts(20, longest=200))]
    expected = {completion.id: completion.token_ids for completion in make_engine(model, max_model_len=LENGTH).generate(requests)}
    engine = start(worker, model)
    try:
        assert engine.engine.engine_core.engine_core.batch_queue_size == 2
        engine.load_weights(model.named_parameters(), 1)
        engine.submit(requests)
        answers: dict[int, tuple[int, ...]] = {}
        for step in range(100):
            if step % 7 == 5:
                engine.load_weights(model.named_parameters(), step)
            answers.update((completion.id, completion.token_ids) for completion in engine.step())
        assert answers == expected
    finally:
        engine.close()


def test_every_field_of_sampling_arrives() -> None:
    plain = request(0, (2, 3), seed=7)
    other = Sampling(temperature=0.5, top_k=3, top_p=0.9, max_tokens=5, stop_token_ids=(8,), ignore_eos=True)
    for field in fields(Sampling):
        changed = replace(plain, sampling=replace(plain.sampling, **{field.name: getattr(other, field.name)}))
        assert sampling_arguments(changed, LENGTH) != sampling_arguments(plain, LENGTH), field.name
    assert sampling_arguments(replace(plain, seed=8), LENGTH) != sampling_arguments(plain, LENGTH)
    assert sampling_arguments(replace(plain, sampling=other), 4)["max_tokens"] == 2, "prompt and answer fit together"


ARRIVES = {
    "dtype": ("dtype", "bfloat16"),
    "max_num_seqs": ("max_num_seqs", 3),
    "tensor_model_parallel_size": ("tensor_parallel_size", 4),
    "gpu_memory_utilization": ("gpu_memory_utilization", 0.25),
    "max_num_batched_tokens": ("max_num_batched_tokens", 77),
    "enforce_eager": ("enforce_eager", True),
    "cudagraph_capture_sizes": ("cudagraph_capture_sizes", [1, 2]),
    "enable_chunked_prefill": ("enable_chunked_prefill", False),
    "enable_prefix_caching": ("enable_prefix_caching", False),
    "load_format": ("load_format", "auto"),
    "seed": ("seed", 9),
}


@pytest.mark.parametrize("key", ARRIVES)
def test_every_engine_key_arrives(key: str) -> None:
    reference, value = ARRIVES[key]
    spec = spec_of("somewhere", name="vllm")
    assert engine_arguments(spec)[reference] != value
    assert engine_arguments(replace(spec, rollout=replace(spec.rollout, **{key: value})))[reference] == value


def test_the_rest_of_a_spec_arrives() -> None:
    spec = spec_of("somewhere", name="vllm", max_model_len=99, override_config={"a": 1}, swap_space=3)
    arguments = engine_arguments(spec)
    assert (arguments["model"], arguments["max_model_len"], arguments["hf_overrides"]) == ("somewhere", 99, {"a": 1})
    assert arguments["swap_space"] == 3 and arguments["enable_sleep_mode"] is False
    assert engine_arguments(on_cuda(spec))["enable_sleep_mode"] is True


def test_groups_of_a_pool_share_the_memory_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    engines.import_engine("vllm", "cpu")
    from workers.rollout.vllm import vllm_cpu

    monkeypatch.setattr(vllm_cpu, "cache_bytes", lambda *_: 2**60)
    unused: Any = None
    spec = spec_of("somewhere", name="vllm")
    one, four = (
        vllm_cpu.completed({}, spec, unused, replace(place(), n_groups=groups))["kv_cache_memory_bytes"] for groups in (1, 4)
    )
    assert four == one // 4


def on_cuda(spec: RolloutSpec) -> RolloutSpec:
    return replace(spec, device="cuda")


def test_heads_that_vllm_has_no_attention_for_on_cpu_are_named(worker: Worker, tmp_path: Path) -> None:
    model = make_small(tmp_path, head_dim=24)
    with pytest.raises(ValueError, match=r"heads of 32, 64, .* has 24"):
        start(worker, model)


def test_a_missing_engine_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"vLLM is not installed here; run scripts/install_engine.sh vllm cpu") as error:
        engines.make_rollout(spec_of("somewhere", name="vllm"), place())
    assert "\n" not in str(error.value)
    engines.check_installed("embedded")
