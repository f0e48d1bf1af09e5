"""vLLM with FSDP2 shards on two ranks, on Ray: one engine over both, and an engine on each."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.workers.engine.toy import VOCABULARY
from tests.workers.rollout.ranks import Run, start_workers
from tests.workers.rollout.vllm_workers import CPU_BUILD
from workers.controller.group import WorkerGroup
from workers.controller.ray.ray_backend import RayBackend
from workers.metric import plain_numbers
from workers.rollout.verification import TURNS

pytestmark = CPU_BUILD


RUNS: dict[str, dict[str, Any]] = {
    "one engine over two ranks": {"tensor_model_parallel_size": 2},
    "two engines": {"tensor_model_parallel_size": 1},
    "one head of keys and values, which both ranks have": {"tensor_model_parallel_size": 2, "num_key_value_heads": 1},
    "bfloat16": {"tensor_model_parallel_size": 2, "dtype": "bfloat16"},
    "an adapter, and ranks that share a head": {
        "tensor_model_parallel_size": 2, "num_key_value_heads": 1, "lora": {"lora_rank": 4, "lora_alpha": 32.0},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerGroup]:
    with RayBackend(run_dir=tmp_path_factory.mktemp("run"), nnodes=1, n_gpus_per_node=2, device="cpu", ray_init={}) as backend:
        yield start_workers(backend)


@pytest.fixture(
    scope="module",
    params=[name if i == 0 else pytest.param(name, marks=pytest.mark.soak) for i, name in enumerate(list(RUNS)[:2])],
)
def run(request: pytest.FixtureRequest, workers: WorkerGroup, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    run = Run(workers, tmp_path_factory.mktemp("model"), "vllm", verify_weights="sample", **RUNS[request.param])
    yield run
    run.start_over()


def test_three_rounds_of_training_sleep_and_sync(run: Run, tmp_path: Path) -> None:
    run.check_rounds(tmp_path)


def test_the_mesh_is_the_rollouts_own(run: Run) -> None:
    run.check_mesh()


def test_a_seed_gives_the_same_answers_again(run: Run) -> None:
    run.rollout.sync_weights(9)
    first, second = (run.answers(greedy=False)[1] for _ in range(2))
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


def test_a_number_that_is_off_is_found_on_the_ranks_that_have_it(run: Run) -> None:
    for name, place, ranks in SPOILED.values():
        message = run.sync_spoiled(name, place)
        for rank in range(2):
            line = f"{name} in vllm on rank {rank} is not the trainer's, weights of version 7: 1 of "
            has_it = run.size == 1 or rank in ranks
            assert message[rank].startswith(line) if has_it else message[rank] == "", message
    run.rollout.sync_weights(10)


def test_what_was_verified_is_counted_over_all_ranks(run: Run) -> None:
    """64 samples read all that the ranks hold, what one of them alone has once."""
    read = sum(plain_numbers(run.rollout.sync_weights(11 + i))["rollout/verified_bytes"] for i in range(TURNS))
    weights = AutoModelForCausalLM.from_pretrained(run.path)
    replicated = sum(weight.nbytes for name, weight in weights.named_parameters() if "norm" in name)
    total = sum(weight.nbytes for weight in weights.parameters())
    assert read == (2 * total if run.size == 1 else total + replicated)


@pytest.mark.soak
@pytest.mark.parametrize("run", list(RUNS)[2:3], indirect=True)
def test_ranks_that_share_a_head_of_keys_and_values(run: Run, tmp_path: Path) -> None:
    """Fewer heads than ranks."""
    run.check_rounds(tmp_path)
    for name, place in (("model.layers.1.self_attn.v_proj.weight", -1), ("model.layers.0.self_attn.k_proj.bias", 0)):
        message = run.sync_spoiled(name, place)
        assert all(line.startswith(f"{name} in vllm on rank {rank} is not the trainer's") for rank, line in enumerate(message)), (
            message
        )
    message = run.sync_spoiled("model.layers.0.self_attn.q_proj.weight", -1)
    assert message[0] == "" and message[1].startswith("model.layers.0.self_attn.q_proj.weight in vllm on rank 1")


@pytest.mark.soak
@pytest.mark.parametrize("run", list(RUNS)[3:4], indirect=True)
def test_half_the_numbers_on_two_ranks(run: Run) -> None:
    """All that is read equals the trainer's float32, cast; what is drawn is near what the trainer says."""
    assert run.sync_spoiled("lm_head.weight", 0)[1] == "", "the first rows are the other rank's, and all else is right"
    run.rollout.sync_weights(3)
    prompts, answers = run.answers(greedy=False)
    assert run.mismatch(prompts, answers) < 0.25


ADAPTER_SPOILED = {  # as SPOILED
    "q_proj": ("layers.0.self_attn.q_proj.lora_B", -1, [1]),
    "q_proj, what comes before the cut": ("layers.0.self_attn.q_proj.lora_A", 0, [0, 1]),
    "v_proj, of the head that both have": ("layers.1.self_attn.v_proj.lora_B", 0, [0, 1]),
    "gate_proj, first rows": ("layers.1.mlp.gate_proj.lora_B", 0, [0]),
    "o_proj, last columns": ("layers.0.self_attn.o_proj.lora_A", -1, [1]),
    "down_proj, what comes after the cut": ("layers.1.mlp.down_proj.lora_B", -1, [0, 1]),
}


@pytest.mark.soak
@pytest.mark.parametrize("run", list(RUNS)[4:], indirect=True)
def test_an_adapter_over_two_ranks(run: Run, tmp_path: Path) -> None:
    """It is cut as the layers are. Greedy answers are those of the merged model that the trainer exports."""
    run.check_rounds(tmp_path)
    for where, index, has_it in ADAPTER_SPOILED.values():
        name = f"base_model.model.model.{where}.weight"
        message = run.sync_spoiled(name, index)
        for rank in (0, 1):
            line = f"{name} in vllm on rank {rank} is not the trainer's, weights of version 7: 1 of "
            assert message[rank].startswith(line) if rank in has_it else message[rank] == "", message
