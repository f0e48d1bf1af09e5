"""What else than plain weights goes over a channel: adapters, experts, half the bits, a pipeline's stages."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.workers.engine.megatron.cases import megatron_config
from tests.workers.rollout.ranks import Groups, Run
from tests.workers.rollout.vllm_workers import CPU_BUILD
from workers.controller.ray.ray_backend import RayBackend

pytestmark = [CPU_BUILD, pytest.mark.soak]
LORA: dict[str, object] = {"lora_rank": 4, "lora_alpha": 32.0}

# (ranks of the trainer, the engine); two ranks are a trainer of Megatron's where a sharding is named
SPECIAL: dict[str, tuple[int, dict[str, Any]]] = {
    "an adapter that is merged": (2, {"engine": "embedded", "lora": LORA, "lora_sync": "merged"}),
    "an adapter that comes to vllm alone": (1, {"engine": "vllm", "lora": LORA}),
    "an adapter that comes to sglang alone": (2, {"engine": "sglang", "lora": LORA, "intermediate_size": 128}),
    "experts": (2, {"engine": "vllm", "architecture": "qwen3_moe"}),
    "bfloat16": (2, {"engine": "vllm", "dtype": "bfloat16"}),
    "from two stages": (2, {"engine": "vllm", "sharding": megatron_config(pp=2), "tie_word_embeddings": True}),
}


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Groups]:
    with RayBackend(run_dir=tmp_path_factory.mktemp("run"), nnodes=1, n_gpus_per_node=6, device="cpu", ray_init={}) as backend:
        yield Groups(backend)


@pytest.fixture
def special(request: pytest.FixtureRequest, groups: Groups, tmp_path: Path) -> Run:
    count, words = SPECIAL[request.param]
    trainers = groups.trainers(count, "megatron" if "sharding" in words else "fsdp")
    size = 1 if words["engine"] == "embedded" else 2
    groups.start_over()
    return Run(
        groups.engines, tmp_path / "model", verify_weights="full", trainers=trainers, tensor_model_parallel_size=size, **words
    )


@pytest.mark.parametrize("special", [name for name in SPECIAL if name != "bfloat16"], indirect=True)
def test_what_else_goes_over(special: Run, tmp_path: Path) -> None:
    special.check_rounds(tmp_path)


@pytest.mark.parametrize("special", [name for name in SPECIAL if "alone" in name], indirect=True)
def test_a_number_of_an_adapter_that_is_off_is_found(special: Run) -> None:
    special.rollout.sync_weights(0)
    adapter = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    message = special.sync_spoiled(adapter, 0)
    assert message[0].startswith(f"{adapter} in {special.rollout.engine} on rank 0 is not the trainer's"), message


@pytest.mark.parametrize("special", ["bfloat16"], indirect=True)
def test_half_the_numbers(special: Run) -> None:
    """All that is read equals the trainer's float32, cast; what is drawn is near what the trainer says."""
    special.rollout.sync_weights(3)
    assert special.mismatch(*special.answers(greedy=False)) < 0.25
