"""What SGLang is asked for, and what stands in for packages that it imports and does not use; no engine is started."""

import shutil
import subprocess
import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import psutil
import pytest
import torch

from configs.validation.rollout import TAKEN_SGLANG_ARGUMENTS
from tests.workers.rollout.engines import request, spec_of
from tests.workers.rollout.vllm_workers import LENGTH, make_small, place
from workers.roles import rollout_engines as engines
from workers.rollout.base import Sampling
from workers.rollout.sglang.sglang_calls import EngineDied
from workers.rollout.sglang.sglang_client import Client, SharedBucket
from workers.rollout.sglang.sglang_cpu import completed, install_stubs
from workers.rollout.sglang.sglang_engine import (
    RESERVED,
    PendingRequest,
    SGLangRollout,
    engine_arguments,
    sampling_arguments,
)
from workers.rollout.sglang.sglang_server import Server


def test_every_field_of_sampling_arrives() -> None:
    plain = request(0, (2, 3), seed=7)
    other = Sampling(temperature=0.5, top_k=3, top_p=0.9, max_tokens=5, stop_token_ids=(8,), ignore_eos=True)
    for field in fields(Sampling):
        changed = replace(plain, sampling=replace(plain.sampling, **{field.name: getattr(other, field.name)}))
        assert sampling_arguments(PendingRequest(changed), LENGTH) != sampling_arguments(PendingRequest(plain), LENGTH), (
            field.name
        )
    everything = replace(plain, sampling=replace(plain.sampling, top_k=0))
    assert sampling_arguments(PendingRequest(everything), LENGTH) == sampling_arguments(PendingRequest(plain), LENGTH), (
        "0 is -1: all tokens"
    )
    seeds = {sampling_arguments(PendingRequest(replace(plain, seed=seed)), LENGTH)["sampling_seed"] for seed in (7, 8, 2**64 - 1)}
    assert len(seeds) == 3 and all(-(2**63) <= seed < 2**63 for seed in seeds), "SGLang takes int64"
    assert sampling_arguments(PendingRequest(replace(plain, sampling=other)), 4)["max_new_tokens"] == 2, (
        "prompt and answer fit together"
    )


def test_what_is_left_of_an_answer_is_asked_for() -> None:
    begun = PendingRequest(request(0, (2, 3), max_tokens=9), token_ids=[5, 6, 7], log_probs=[-1.0] * 3)
    assert begun.known == (2, 3, 5, 6, 7)
    assert sampling_arguments(begun, LENGTH)["max_new_tokens"] == 6


@pytest.mark.parametrize(
    ("reason", "tokens", "why"),
    [
        ("stop", [5, 1], "stop"),
        ("length", [5] * 4, "length"),
        ("abort", [5, 6], "abort"),
        ("abort", [], "abort"),
        ("abort", [5, 1], "stop"),
        ("abort", [5] * 4, "length"),
    ],
)
def test_why_an_answer_ended(reason: str, tokens: list[int], why: str) -> None:
    """SGLang says abort of an answer that it was asked to end, also if it had just ended by itself."""
    assert PendingRequest(request(0, (2, 3), max_tokens=4), token_ids=tokens).ended(reason, LENGTH) == why
    deaf = request(0, (2, 3), max_tokens=4, ignore_eos=True)
    assert PendingRequest(deaf, token_ids=[5, 1]).ended("abort", LENGTH) == "abort"


ARRIVES = {
    "dtype": ("dtype", "bfloat16"),
    "max_num_seqs": ("max_running_requests", 3),
    "tensor_model_parallel_size": ("tp_size", 4),
    "gpu_memory_utilization": ("mem_fraction_static", 0.25),
    "max_num_batched_tokens": ("max_prefill_tokens", 77),
    "cudagraph_capture_sizes": ("cuda_graph_bs_decode", [1, 2]),
    "load_format": ("load_format", "auto"),
    "seed": ("random_seed", 9),
}
TURNED = {
    "enforce_eager": ("disable_cuda_graph", True, True),
    "enable_chunked_prefill": ("chunked_prefill_size", False, -1),
    "enable_prefix_caching": ("disable_radix_cache", False, True),
}


@pytest.mark.parametrize(
    ("key", "argument", "value", "translated"),
    [(key, argument, value, value) for key, (argument, value) in ARRIVES.items()]
    + [(key, argument, value, translated) for key, (argument, value, translated) in TURNED.items()],
)
def test_every_engine_key_arrives(key: str, argument: str, value: object, translated: object) -> None:
    spec = spec_of("somewhere", name="sglang")
    assert engine_arguments(spec, 0)[argument] != translated
    assert engine_arguments(replace(spec, rollout=replace(spec.rollout, **{key: value})), 0)[argument] == translated
    assert argument in TAKEN_SGLANG_ARGUMENTS


def test_the_rest_of_a_spec_arrives() -> None:
    spec = spec_of("somewhere", name="sglang", max_model_len=99, override_config={"a": 1}, schedule_policy="lpm")
    arguments = engine_arguments(spec, 2)
    assert (arguments["model_path"], arguments["context_length"]) == ("somewhere", 99 + RESERVED)
    assert arguments["json_model_override_args"] == '{"a": 1}' and arguments["schedule_policy"] == "lpm"
    assert arguments["base_gpu_id"] == 2 and arguments["enable_memory_saver"] is False
    assert arguments["sleep_on_idle"] is True and arguments["chunked_prefill_size"] == 2048
    assert engine_arguments(replace(spec, device="cuda"), 0)["enable_memory_saver"] is True


def test_on_cpu_the_cache_holds_all_sequences_within_the_memory_that_engines_share() -> None:
    spec = spec_of("somewhere", name="sglang", max_model_len=100, slots=4)
    arguments = completed(engine_arguments(spec, 1), spec, token_bytes=10, engines=2)
    assert (arguments["max_total_tokens"], arguments["base_gpu_id"], arguments["device"]) == (400, 0, "cpu")
    alone, both = (
        completed(engine_arguments(spec, 1), spec, token_bytes=2**26, engines=engines)["max_total_tokens"] for engines in (1, 2)
    )
    assert both == alone // 2 < 200
    chosen = spec_of("somewhere", name="sglang", max_total_tokens=7)
    assert completed(engine_arguments(chosen, 0), chosen, token_bytes=10, engines=1)["max_total_tokens"] == 7


def test_a_bucket_is_cast_and_its_memory_used_again() -> None:
    bucket = SharedBucket(0, torch.device("cpu"), torch.bfloat16)
    weights = [("a", torch.randn(3, 5, dtype=torch.float64)), ("b", torch.randn(7))]
    for scale in (1.0, 2.0):
        views = bucket.views([(name, tensor * scale) for name, tensor in weights])
        assert all(torch.equal(view, (tensor * scale).bfloat16()) for (_, view), (_, tensor) in zip(views, weights, strict=True))
        memory = {view.untyped_storage().data_ptr() for _, view in views}
        assert len(memory) == 1 and all(view.is_shared() and view.data_ptr() % 64 == 0 for _, view in views)
    assert {view.untyped_storage().data_ptr() for _, view in bucket.views(weights[:1])} == memory


def test_too_little_shared_memory_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
    bucket = SharedBucket(0, torch.device("cpu"), torch.float32)
    bucket.views([("a", torch.zeros(16))])
    with pytest.raises(RuntimeError, match=r"/dev/shm has 100 bytes free, and 128 bytes .*update_weights_bucket_megabytes"):
        bucket.views([("a", torch.zeros(32))])


def test_before_there_were_brackets_none_are_asked_for() -> None:
    old = Server.__new__(Server)  # without an engine
    old.bracketed = False
    old.begin_update()
    old.end_update()


def test_an_engine_that_does_not_start_is_named_with_what_it_wrote(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(EngineDied, match=r"SGLang died in start: process \d+ ended with 1\nit wrote last:\n(.|\n)*Python"):
        Client({"tp_size": 1}, {"PYTHONHOME": "/nowhere"})


def test_a_start_that_is_broken_off_leaves_nothing_running(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(client: Client, method: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Client, "_answer", interrupted)
    before = set(psutil.Process().children())
    with pytest.raises(KeyboardInterrupt):
        Client({"tp_size": 1}, {})
    assert set(psutil.Process().children()) == before


def test_stand_ins_are_there_for_sglang_alone() -> None:
    """Names are there and do nothing; this process has none of them."""
    program = """
from workers.rollout.sglang.sglang_cpu import install_stubs
install_stubs()
import json, torchvision.transforms.functional, triton.language as tl
from torchvision.transforms import InterpolationMode
from sgl_kernel import anything
@__import__("triton").jit
def kernel(a: tl.constexpr): return a + 1
assert kernel(3) == 4 and InterpolationMode("bicubic") is InterpolationMode.BICUBIC and json.__file__ != triton.__file__
class Sub(tl.Tensor): pass
"""
    subprocess.run([sys.executable, "-c", program.replace("triton.__file__", "'triton'")], check=True)
    assert not any(type(finder).__module__ == install_stubs.__module__ for finder in sys.meta_path)


def test_a_missing_engine_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"SGLang is not installed here; run scripts/install_engine.sh sglang cpu") as error:
        engines.make_rollout(spec_of("somewhere", name="sglang"), place())
    assert "\n" not in str(error.value)


class Recorder:
    """In SGLang's place. Notes what is asked; and how many calls have no answer, on ranks and otherwise."""

    facts: ClassVar[dict[str, int]] = {"max_total_num_tokens": 1}

    def __init__(self, arguments: object, environment: object) -> None:
        self.calls: list[str] = []
        self.begun = self.on_ranks = 0

    def call(self, method: str, *args: object) -> None:
        self.begin(method)
        self.begun = 0

    def begin(self, method: str, *args: object) -> None:
        assert self.on_ranks == 0, "an update ends when all is there"
        self.calls.append(method)
        self.begun += 1

    def begin_on_ranks(self, method: str, *args: object) -> None:
        assert self.begun == 0, "SGLang has confirmed that it takes weights"
        self.calls.append(method)
        self.on_ranks += 1

    def wait(self, left: int = 0) -> None:
        self.begun = min(left, self.begun)

    def wait_for_ranks(self, left: int = 0) -> None:
        self.on_ranks = min(left, self.on_ranks)


def test_two_buckets_are_what_the_key_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPU there are small ones, so that there is a next one to fill while SGLang takes one."""
    monkeypatch.setattr("workers.rollout.sglang.sglang_engine.Client", Recorder)
    make_small(tmp_path)
    found = {}
    for device, megabytes in (("cpu", 2048), ("cpu", 8), ("cuda", 2048)):
        spec = replace(spec_of(str(tmp_path), name="sglang", update_weights_bucket_megabytes=megabytes), device=device)
        found[device, megabytes] = SGLangRollout(spec, place()).bucket_bytes // 2**20
    assert found == {("cpu", 2048): 32, ("cpu", 8): 4, ("cuda", 2048): 1024}


def test_no_bucket_outlives_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is gathered, the tensors of the one before are gone: besides the shared memory there is one at a time."""
    monkeypatch.setattr("workers.rollout.sglang.sglang_engine.Client", Recorder)
    model = make_small(tmp_path)
    engine = engines.make_rollout(spec_of(str(tmp_path), name="sglang"), place())
    assert isinstance(engine, SGLangRollout)
    largest = max(weight.nbytes for weight in model.parameters())
    engine.bucket_bytes = 4 * largest
    alive: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
    peak = 0

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal peak
        for name, weight in model.named_parameters():
            tensor = weight.detach().clone()
            alive.add(tensor.untyped_storage())
            peak = max(peak, sum(storage.nbytes() for storage in alive))
            yield name, tensor

    recorder, fill = engine.engine, SharedBucket.views
    assert isinstance(recorder, Recorder)

    def fill_one_that_is_free(bucket: SharedBucket, named: Sequence[tuple[str, torch.Tensor]]) -> object:
        assert recorder.on_ranks <= 1, "of two buckets the other one alone may be in use"
        return fill(bucket, named)

    monkeypatch.setattr(SharedBucket, "views", fill_one_that_is_free)
    engine.load_weights(gathered(), 1)
    begin, update, *loads, end, flush = recorder.calls
    assert (begin, update, end, flush) == ("begin_update", "update", "end_update", "flush")
    assert set(loads) == {"load"} and len(loads) > 2
    assert peak <= engine.bucket_bytes + 2 * largest, "and the two that are on their way"
    memory = [bucket._memory for bucket in engine._shared]
    engine.load_weights(gathered(), 2)
    assert all(bucket._memory is kept for bucket, kept in zip(engine._shared, memory, strict=True)), "no new pages are taken"
    assert all(kept.nbytes >= 2 * largest for kept in memory)
