"""Engines on ranks of their own, apart from the trainer's, on Ray: the same requirements as for colocated ones."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.tiny import fsdp_config
from tests.trainer.watchdogs import watchdog
from tests.workers.rollout.ranks import Groups, Run, start_workers
from tests.workers.rollout.vllm_workers import CPU_BUILD, SpoilingWorker
from workers.controller.group import PhaseTimeout, WorkerError
from workers.controller.ray.ray_backend import RayBackend
from workers.controller.rpc import worker_call
from workers.metric import plain_numbers

pytestmark = CPU_BUILD
SLACK = 8.0  # seconds from a fault to a clear end, on a busy machine
SOAK = pytest.mark.soak
AWAY = fsdp_config(param_offload=True, optimizer_offload=True)

# (ranks of the trainer, the engine)
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "embedded, from two ranks": (2, {"engine": "embedded", "tensor_model_parallel_size": 1, "sharding": AWAY}),
    "vllm over two ranks, from one": (1, {"engine": "vllm", "tensor_model_parallel_size": 2}),
    "embedded, from one rank": (1, {"engine": "embedded", "tensor_model_parallel_size": 1}),
    "vllm over two ranks, from two": (2, {"engine": "vllm", "tensor_model_parallel_size": 2}),
    "two of vllm": (1, {"engine": "vllm", "tensor_model_parallel_size": 1}),
    "sglang over two ranks, from one": (1, {"engine": "sglang", "tensor_model_parallel_size": 2}),
    "sglang over two ranks, from two": (2, {"engine": "sglang", "tensor_model_parallel_size": 2}),
}


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Groups]:
    with RayBackend(run_dir=tmp_path_factory.mktemp("run"), nnodes=1, n_gpus_per_node=6, device="cpu", ray_init={}) as backend:
        yield Groups(backend)


@pytest.fixture(scope="module", params=[name if i == 1 else pytest.param(name, marks=SOAK) for i, name in enumerate(RUNS)])
def run(request: pytest.FixtureRequest, groups: Groups, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    count, words = RUNS[request.param]
    path = tmp_path_factory.mktemp("model")
    run = Run(groups.engines, path, verify_weights="full", bucket=1, trainers=groups.trainers(count), **words)
    yield run
    run.start_over()


def test_three_rounds_of_training_and_sync(run: Run, tmp_path: Path) -> None:
    run.check_rounds(tmp_path)


def test_every_byte_is_verified_and_what_is_off_is_found(run: Run) -> None:
    weights = AutoModelForCausalLM.from_pretrained(run.path)
    whole = sum(weight.nbytes for weight in weights.parameters())
    replicated = sum(weight.nbytes for name, weight in weights.named_parameters() if "norm" in name)
    read = plain_numbers(run.rollout.sync_weights(5))["rollout/verified_bytes"]
    assert read == (2 * whole if run.size == 1 else whole + replicated if run.rollout.engine == "vllm" else whole)
    message = run.sync_spoiled("model.layers.1.input_layernorm.weight", 3)
    for rank, line in enumerate(message):
        wanted = f"model.layers.1.input_layernorm.weight in {run.rollout.engine} on rank {rank} is not the trainer's, weights of"
        assert line.startswith(wanted) or (rank and run.size == 2 and run.rollout.engine == "sglang" and line == ""), message
    run.rollout.sync_weights(8)


FAULTS = {
    "an engine's rank": ("engines", r"rank \d failed in weight sync \(rollout engine embedded\): process \d+ died: killed"),
    "the trainer": ("trainers", r"rank 0 failed in weight sync \(actor sends\): process \d+ died: killed"),
}


@pytest.mark.parametrize("who", ["an engine's rank", pytest.param("the trainer", marks=SOAK)])
def test_who_dies_in_a_sync_is_named_at_once(who: str, groups: Groups, tmp_path: Path) -> None:
    engines, trainers = start_workers(groups.backend, "mortal-engines", 1), start_workers(groups.backend, "mortal-trainers", 1)
    run = Run(engines, tmp_path, "embedded", 1, verify_weights="full", trainers=trainers)
    run.rollout.sync_weights(0)
    group, message = FAULTS[who]
    ({"engines": engines, "trainers": trainers}[group]).call(worker_call(SpoilingWorker.signal_at, 5, signal.SIGKILL)).result()
    begun = time.monotonic()
    with pytest.raises(WorkerError, match=message):
        run.rollout.sync_weights(1)
    assert time.monotonic() - begun < SLACK
    engines.shutdown()
    trainers.shutdown()


@SOAK
def test_a_late_rank_in_a_sync_is_reported(groups: Groups, tmp_path: Path) -> None:
    """The trainer is stopped. The engines' ranks wait for it, and the channel's limit is over first."""
    engines = start_workers(groups.backend, "waiting-engines", 1, collective=2.0)
    trainers = start_workers(groups.backend, "stopped-trainers", 1)
    run = Run(engines, tmp_path, "embedded", 1, verify_weights="full", trainers=trainers)
    run.rollout.watchdog = watchdog(tmp_path, collective=2.0)
    run.rollout.sync_weights(0)
    trainers.call(worker_call(SpoilingWorker.signal_at, 5, signal.SIGSTOP)).result()
    begun = time.monotonic()
    with pytest.raises(PhaseTimeout) as raised:
        run.rollout.sync_weights(1)
    assert time.monotonic() - begun < 2.0 + SLACK
    message = str(raised.value)
    assert message.startswith(
        "a collective in weight sync (rollout engine embedded), limited by timeouts.collective=2, took more than 2 s"
    )
    assert "weight sync (actor sends): step 0, phase sync\nheld up by rank 0: a process of it is stopped" in message
    engines.shutdown()
    trainers.shutdown()
