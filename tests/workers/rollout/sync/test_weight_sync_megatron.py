"""Rollout engines colocated with a Megatron actor of another parallel layout, on two ranks, on Ray."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.workers.engine.megatron.cases import megatron_config
from tests.workers.rollout.ranks import Run, start_workers
from tests.workers.rollout.sglang.test_sglang_engine_ranks import processes
from tests.workers.rollout.vllm_workers import CPU_BUILD
from workers.controller.group import WorkerGroup
from workers.controller.ray.ray_backend import RayBackend

pytestmark = CPU_BUILD

RUNS: dict[str, tuple[str, int, dict[str, Any]]] = {  # the rollout engine, its tensor parallelism, the model's configuration
    "vllm over both": ("vllm", 2, {"tie_word_embeddings": True}),
    "sglang over both": ("sglang", 2, {}),
    "embedded on each": ("embedded", 1, {}),
}


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerGroup]:
    with RayBackend(run_dir=tmp_path_factory.mktemp("run"), nnodes=1, n_gpus_per_node=2, device="cpu", ray_init={}) as backend:
        yield start_workers(backend)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name.startswith("embedded") else [pytest.mark.soak]) for name in RUNS]
)
def test_two_stages(workers: WorkerGroup, name: str, tmp_path: Path) -> None:
    engine, size, changes = RUNS[name]
    run = Run(workers, tmp_path / "model", engine, size, verify_weights="full", sharding=megatron_config(pp=2), **changes)
    run.check_rounds(tmp_path)
    for server in processes("sglang_server"):
        assert "TORCHDYNAMO_DISABLE" not in server.environ(), "what Megatron is loaded with stays with it"
    run.start_over()
