"""Experts in engines that keep them in their own way: synced, verified to the last number, and answering like transformers."""

from collections.abc import Iterator
from typing import Literal

import pytest
import torch
from transformers import PreTrainedModel

from configs.schema.common import Dtype
from tests.workers.rollout.engines import (
    ModelSource,
    load_unspoiled,
    one_off,
    ragged_prompts,
    spec_of,
    spoil_loading,
    weight_sync,
)
from tests.workers.rollout.vllm_workers import CPU_BUILD, LENGTH, greedy_errors, make_small, place
from workers.metric import plain_numbers
from workers.roles.rollout_engines import make_rollout
from workers.roles.worker import Worker
from workers.rollout.base import Rollout, RolloutSpec
from workers.rollout.sync.weight_sync import WeightSync
from workers.rollout.verification import TURNS, WeightMismatch

pytestmark = CPU_BUILD
Name = Literal["vllm", "sglang"]


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker(place(), "cpu", 600.0)
    yield worker
    worker.close()


class Case:
    def __init__(self, worker: Worker, model: PreTrainedModel, name: Name, dtype: Dtype) -> None:
        self.model, self.name, self.dtype = model, name, dtype
        self.spec: RolloutSpec = spec_of(model.config._name_or_path, name=name, max_model_len=LENGTH, slots=16, dtype=dtype)
        self.engine: Rollout = make_rollout(self.spec, worker.info)
        self.files = [name for name, _ in self.engine.to_engine_names(model.named_parameters())]

    def sync(self, mode: Literal["sample", "full"]) -> WeightSync:
        return weight_sync(self.engine, ModelSource(self.model), self.spec, mode)

    def verified(self, mode: Literal["sample", "full"], version: int) -> float:
        return plain_numbers(self.sync(mode)(version)[1])["rollout/verified_bytes"]

    def nbytes(self) -> int:
        return sum(weight.numel() for weight in self.model.parameters()) * getattr(torch, self.dtype).itemsize


@pytest.fixture(
    scope="module",
    params=[
        ("vllm", "float32"),
        *(pytest.param(case, marks=pytest.mark.soak) for case in (("vllm", "bfloat16"), ("sglang", "float32"))),
    ],
    ids=lambda param: "-".join(param),
)
def shared(request: pytest.FixtureRequest, worker: Worker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    case = Case(worker, make_small(tmp_path_factory.mktemp("model"), "qwen3_moe"), *request.param)
    yield case
    case.engine.close()


@pytest.fixture
def case(shared: Case) -> Iterator[Case]:
    yield shared
    load_unspoiled(shared.engine)


def test_every_expert_arrives_also_after_sleep_and_is_read(case: Case) -> None:
    for version in range(2):
        assert case.verified("full", version) == case.nbytes()
        if case.dtype == "float32":
            assert max(greedy_errors(case.model, case.engine, ragged_prompts(3))) < 1e-5
        with torch.no_grad():
            for weight in case.model.parameters():
                weight.add_(torch.randn_like(weight) * 0.03)
        case.engine.sleep()
        case.engine.wake(weights=True, kv_cache=True)
    sampling = case.sync("sample")
    found = [plain_numbers(sampling(version)[1])["rollout/verified_bytes"] for version in range(2, 2 + TURNS)]
    assert sum(found) == case.nbytes()


def test_one_number_that_is_off_in_any_expert_is_seen(case: Case) -> None:
    """First and last of each tensor of layer 1's first and last expert, and of its router."""
    wanted = [name for name in case.files if "layers.1.mlp" in name and (".experts.0." in name or ".experts.7." in name)]
    for version, name in enumerate([*wanted, "model.layers.1.mlp.gate.weight"]):
        for index in (0, -1):
            spoil_loading(case.engine, one_off(name, index))
            with pytest.raises(WeightMismatch) as error:
                case.sync("full")(version)
            line = f"{name} in {case.name} on rank 0 is not the trainer's, weights of version {version}"
            assert str(error.value).startswith(line)
    assert len(wanted) == 6


def test_vllm_pads_what_its_kernel_wants_wider(worker: Worker, tmp_path_factory: pytest.TempPathFactory) -> None:
    """40 is no multiple of 32."""
    case = Case(worker, make_small(tmp_path_factory.mktemp("model"), "qwen3_moe", moe_intermediate_size=40), "vllm", "float32")
    assert case.verified("full", 0) >= case.nbytes()
    assert max(greedy_errors(case.model, case.engine, ragged_prompts(3))) < 1e-5
    case.engine.close()


def test_parts_of_an_expert_on_two_ranks() -> None:
    """Rows of gate and up, columns of down; each expert has its own."""
    from types import SimpleNamespace

    from workers.rollout.vllm.vllm_weights import experts_of

    config = SimpleNamespace(intermediate_size_per_partition_unpadded=16, hidden_dim_unpadded=64, tp_rank=1)
    places = [("experts.w13_", "w1", "gate_proj"), ("experts.w2_", "w2", "down_proj"), ("experts.w13_", "w3", "up_proj")]
    experts = SimpleNamespace(
        moe_config=config,
        get_parameter=lambda leaf: torch.empty((2, 32, 64) if leaf == "w13_weight" else (2, 64, 16), device="meta"),
        get_expert_mapping=lambda: [(to, f"experts.{i}.{name}.", i, place) for i in range(2) for to, place, name in places],
    )
    path = "model.layers.0.mlp.experts.routed_experts"
    found = {part.name.removeprefix("model.layers.0.mlp.experts."): part for part in experts_of(path, "w13_weight", experts)}
    assert {name: (part.row, part.rows, part.dim, part.start, part.size, part.expert) for name, part in found.items()} == {
        "0.gate_proj.weight": (0, 16, 0, 16, 16, 0),
        "0.up_proj.weight": (16, 16, 0, 16, 16, 0),
        "1.gate_proj.weight": (0, 16, 0, 16, 16, 1),
        "1.up_proj.weight": (16, 16, 0, 16, 16, 1),
    }
    down = experts_of(path, "w2_weight", experts)
    assert [(part.row, part.rows, part.dim, part.start, part.size, part.expert) for part in down] == [
        (0, 64, 1, 16, 16, expert) for expert in range(2)
    ]
