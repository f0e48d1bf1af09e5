"""vLLM beside FSDP2 shards on two ranks, on Ray: one engine over both, and an engine on each."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.workers.engine.toy import VOCABULARY
from tests.workers.rollout.ranks import Run
from tests.workers.rollout.vllm_hosts import CPU_BUILD
from workers.controller.ray_backend import RayBackend
from workers.metric import plain_numbers
from workers.rollout.verification import TURNS

pytestmark = CPU_BUILD


@pytest.fixture(scope="module", params=[2, 1], ids=["one engine over two ranks", "two engines"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("run")
    with RayBackend(run_dir=folder, nnodes=1, n_gpus_per_node=2, device="cpu", ray_init={}) as backend:
        run = Run(backend, folder / "model", "vllm", request.param, verify_weights="sample")
        yield run
        run.close()


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
        said = run.sync_spoiled(name, place)
        for rank in range(2):
            line = f"{name} in vllm on rank {rank} is not the trainer's, weights of version 7: 1 of "
            has_it = run.size == 1 or rank in ranks
            assert said[rank].startswith(line) if has_it else said[rank] == "", said
    run.rollout.sync_weights(10)


def test_what_was_verified_is_counted_over_all_ranks(run: Run) -> None:
    """64 samples read all that the ranks hold, what one of them alone has once."""
    read = sum(plain_numbers(run.rollout.sync_weights(11 + i))["rollout/verified_bytes"] for i in range(TURNS))
    weights = AutoModelForCausalLM.from_pretrained(run.path)
    replicated = sum(weight.nbytes for name, weight in weights.named_parameters() if "norm" in name)
    total = sum(weight.nbytes for weight in weights.parameters())
    assert read == (2 * total if run.size == 1 else total + replicated)
