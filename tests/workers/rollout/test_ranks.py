"""Engines on two ranks, on Ray: vLLM colocated with FSDP2 shards; engines apart from the trainer's ranks; engines colocated with
a Megatron actor of another parallel layout. One set of workers for all: their imports take longer than the tests."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny import fsdp_config
from tests.trainer.watchdogs import watchdog
from tests.workers.engine.megatron.cases import megatron_config
from tests.workers.engine.toy import VOCABULARY
from tests.workers.rollout.ranks import Groups, Run, start_workers
from tests.workers.rollout.sglang.test_sglang_engine_ranks import processes
from tests.workers.rollout.vllm_workers import CPU_BUILD, SpoilingWorker
from workers.controller.group import PhaseTimeout, WorkerError
from workers.controller.ray.ray_backend import RayBackend
from workers.controller.rpc import worker_call
from workers.metric import plain_numbers
from workers.rollout.verification import TURNS

pytestmark = CPU_BUILD
SLACK = 8.0  # seconds from a fault to a clear end, on a busy machine
SOAK = pytest.mark.soak
AWAY = fsdp_config(param_offload=True, optimizer_offload=True)

COLOCATED: dict[str, dict[str, Any]] = {
    "one engine over two ranks": {"tensor_model_parallel_size": 2},
    "two engines": {"tensor_model_parallel_size": 1},
    "one head of keys and values, which both ranks have": {"tensor_model_parallel_size": 2, "num_key_value_heads": 1},
    "bfloat16": {"tensor_model_parallel_size": 2, "dtype": "bfloat16"},
    "an adapter, and ranks that share a head": {
        "tensor_model_parallel_size": 2, "num_key_value_heads": 1, "lora": {"lora_rank": 4, "lora_alpha": 32.0},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Groups]:
    with RayBackend(run_dir=tmp_path_factory.mktemp("run"), nnodes=1, n_gpus_per_node=4, device="cpu", ray_init={}) as backend:
        yield Groups(backend)


@pytest.fixture(
    scope="module", params=[name if i == 0 else pytest.param(name, marks=SOAK) for i, name in enumerate(list(COLOCATED)[:2])]
)
def colocated(request: pytest.FixtureRequest, groups: Groups, tmp_path_factory: pytest.TempPathFactory) -> Run:
    groups.start_over()
    path = tmp_path_factory.mktemp("model")
    return Run(groups.engines, path, "vllm", verify_weights="sample", **COLOCATED[request.param])


def test_three_rounds_of_training_sleep_and_sync(colocated: Run, tmp_path: Path) -> None:
    colocated.check_rounds(tmp_path)


def test_the_mesh_is_the_rollouts_own(colocated: Run) -> None:
    colocated.check_mesh()


def test_a_seed_gives_the_same_answers_again(colocated: Run) -> None:
    colocated.rollout.sync_weights(9)
    first, second = (colocated.answers(greedy=False)[1] for _ in range(2))
    assert torch.equal(first.tokens["input_ids"], second.tokens["input_ids"])
    assert first.tokens["input_ids"].max() < VOCABULARY


SPOILED = {  # (tensor, a number of it, which of two ranks has it when they are one engine): cut by rows, by columns, not at all
    "embed_tokens, first rows": ("model.embed_tokens.weight", 0, [0]),
    "lm_head, last row": ("lm_head.weight", -1, [1]),
    "v_proj, second head": ("model.layers.1.self_attn.v_proj.weight", -1, [1]),
    "k_proj, bias": ("model.layers.0.self_attn.k_proj.bias", 0, [0]),
    "up_proj": ("model.layers.0.mlp.up_proj.weight", -1, [1]),
    "o_proj, first columns": ("model.layers.0.self_attn.o_proj.weight", 0, [0]),
    "down_proj, last columns": ("model.layers.1.mlp.down_proj.weight", -1, [1]),
    "norm": ("model.layers.1.input_layernorm.weight", 3, [0, 1]),
}


def test_a_number_that_is_off_is_found_on_the_ranks_that_have_it(colocated: Run) -> None:
    for name, place, ranks in SPOILED.values():
        message = colocated.sync_spoiled(name, place)
        for rank in range(2):
            line = f"{name} in vllm on rank {rank} is not the trainer's, weights of version 7: 1 of "
            has_it = colocated.size == 1 or rank in ranks
            assert message[rank].startswith(line) if has_it else message[rank] == "", message
    colocated.rollout.sync_weights(10)


def test_what_was_verified_is_counted_over_all_ranks(colocated: Run) -> None:
    """64 samples read all that the ranks hold, what one of them alone has once."""
    read = sum(plain_numbers(colocated.rollout.sync_weights(11 + i))["rollout/verified_bytes"] for i in range(TURNS))
    weights = AutoModelForCausalLM.from_pretrained(colocated.path)
    replicated = sum(weight.nbytes for name, weight in weights.named_parameters() if "norm" in name)
    total = sum(weight.nbytes for weight in weights.parameters())
    assert read == (2 * total if colocated.size == 1 else total + replicated)


@SOAK
@pytest.mark.parametrize("colocated", list(COLOCATED)[2:3], indirect=True)
def test_ranks_that_share_a_head_of_keys_and_values(colocated: Run, tmp_path: Path) -> None:
    """Fewer heads than ranks."""
    colocated.check_rounds(tmp_path)
    for name, place in (("model.layers.1.self_attn.v_proj.weight", -1), ("model.layers.0.self_attn.k_proj.bias", 0)):
        message = colocated.sync_spoiled(name, place)
        assert all(line.startswith(f"{name} in vllm on rank {rank} is not the trainer's") for rank, line in enumerate(message)), (
            message
        )
    message = colocated.sync_spoiled("model.layers.0.self_attn.q_proj.weight", -1)
    assert message[0] == "" and message[1].startswith("model.layers.0.self_attn.q_proj.weight in vllm on rank 1")


@SOAK
@pytest.mark.parametrize("colocated", list(COLOCATED)[3:4], indirect=True)
def test_half_the_numbers_on_two_ranks(colocated: Run) -> None:
    """All that is read equals the trainer's float32, cast; what is drawn is near what the trainer says."""
    assert colocated.sync_spoiled("lm_head.weight", 0)[1] == "", "the first rows are the other rank's, and all else is right"
    colocated.rollout.sync_weights(3)
    prompts, answers = colocated.answers(greedy=False)
    assert colocated.mismatch(prompts, answers) < 0.25


ADAPTER_SPOILED = {  # as SPOILED
    "q_proj": ("layers.0.self_attn.q_proj.lora_B", -1, [1]),
    "q_proj, what comes before the cut": ("layers.0.self_attn.q_proj.lora_A", 0, [0, 1]),
    "v_proj, of the head that both have": ("layers.1.self_attn.v_proj.lora_B", 0, [0, 1]),
    "gate_proj, first rows": ("layers.1.mlp.gate_proj.lora_B", 0, [0]),
    "o_proj, last columns": ("layers.0.self_attn.o_proj.lora_A", -1, [1]),
    "down_proj, what comes after the cut": ("layers.1.mlp.down_proj.lora_B", -1, [0, 1]),
}


@SOAK
@pytest.mark.parametrize("colocated", list(COLOCATED)[4:], indirect=True)
def test_an_adapter_over_two_ranks(colocated: Run, tmp_path: Path) -> None:
    """It is cut as the layers are. Greedy answers are those of the merged model that the trainer exports."""
    colocated.check_rounds(tmp_path)
    for where, index, has_it in ADAPTER_SPOILED.values():
        name = f"base_model.model.model.{where}.weight"
        message = colocated.sync_spoiled(name, index)
        for rank in (0, 1):
            line = f"{name} in vllm on rank {rank} is not the trainer's, weights of version 7: 1 of "
            assert message[rank].startswith(line) if rank in has_it else message[rank] == "", message


# (ranks of the trainer, the engine)
APART: dict[str, tuple[int, dict[str, Any]]] = {
    "embedded, from two ranks": (2, {"engine": "embedded", "tensor_model_parallel_size": 1, "sharding": AWAY}),
    "vllm over two ranks, from one": (1, {"engine": "vllm", "tensor_model_parallel_size": 2}),
    "embedded, from one rank": (1, {"engine": "embedded", "tensor_model_parallel_size": 1}),
    "vllm over two ranks, from two": (2, {"engine": "vllm", "tensor_model_parallel_size": 2}),
    "two of vllm": (1, {"engine": "vllm", "tensor_model_parallel_size": 1}),
    "sglang over two ranks, from one": (1, {"engine": "sglang", "tensor_model_parallel_size": 2}),
    "sglang over two ranks, from two": (2, {"engine": "sglang", "tensor_model_parallel_size": 2}),
}


@pytest.fixture(scope="module", params=[name if i == 1 else pytest.param(name, marks=SOAK) for i, name in enumerate(APART)])
def apart(request: pytest.FixtureRequest, groups: Groups, tmp_path_factory: pytest.TempPathFactory) -> Run:
    count, words = APART[request.param]
    groups.start_over()
    path = tmp_path_factory.mktemp("model")
    return Run(groups.engines, path, verify_weights="full", bucket=1, trainers=groups.trainers(count), **words)


def test_three_rounds_of_training_and_sync(apart: Run, tmp_path: Path) -> None:
    apart.check_rounds(tmp_path)


def test_every_byte_is_verified_and_what_is_off_is_found(apart: Run) -> None:
    weights = AutoModelForCausalLM.from_pretrained(apart.path)
    whole = sum(weight.nbytes for weight in weights.parameters())
    replicated = sum(weight.nbytes for name, weight in weights.named_parameters() if "norm" in name)
    read = plain_numbers(apart.rollout.sync_weights(5))["rollout/verified_bytes"]
    assert read == (2 * whole if apart.size == 1 else whole + replicated if apart.rollout.engine == "vllm" else whole)
    message = apart.sync_spoiled("model.layers.1.input_layernorm.weight", 3)
    for rank, line in enumerate(message):
        wanted = (
            f"model.layers.1.input_layernorm.weight in {apart.rollout.engine} on rank {rank} is not the trainer's, weights of"
        )
        assert line.startswith(wanted) or (rank and apart.size == 2 and apart.rollout.engine == "sglang" and line == ""), message
    apart.rollout.sync_weights(8)


STAGES: dict[str, tuple[str, int, dict[str, Any]]] = {  # the rollout engine, its tensor parallelism, the model's configuration
    "vllm over both": ("vllm", 2, {"tie_word_embeddings": True}),
    "sglang over both": ("sglang", 2, {}),
    "embedded on each": ("embedded", 1, {}),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name.startswith("embedded") else SOAK) for name in STAGES])
def test_two_stages(groups: Groups, name: str, tmp_path: Path) -> None:
    groups.start_over()
    engine, size, changes = STAGES[name]
    run = Run(groups.engines, tmp_path / "model", engine, size, verify_weights="full", sharding=megatron_config(pp=2), **changes)
    run.check_rounds(tmp_path)
    for server in processes("sglang_server"):
        assert "TORCHDYNAMO_DISABLE" not in server.environ(), "what Megatron is loaded with stays with it"


FAULTS = {
    "an engine's rank": ("engines", r"rank \d failed in weight sync \(rollout engine embedded\): process \d+ died: killed"),
    "the trainer": ("trainers", r"rank 0 failed in weight sync \(actor sends\): process \d+ died: killed"),
}


@pytest.mark.parametrize("who", ["an engine's rank", pytest.param("the trainer", marks=SOAK)])
def test_who_dies_in_a_sync_is_named_at_once(who: str, groups: Groups, tmp_path: Path) -> None:
    groups.start_over()
    engines, trainers = groups.engines, groups.trainers(1)
    run = Run(engines, tmp_path, "embedded", 1, verify_weights="full", trainers=trainers)
    run.rollout.sync_weights(0)
    group, message = FAULTS[who]
    ({"engines": engines, "trainers": trainers}[group]).call(worker_call(SpoilingWorker.signal_at, 5, signal.SIGKILL)).result()
    begun = time.monotonic()
    with pytest.raises(WorkerError, match=message):
        run.rollout.sync_weights(1)
    assert time.monotonic() - begun < SLACK
    groups.shutdown()


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
