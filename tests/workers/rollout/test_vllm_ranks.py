"""vLLM beside FSDP2 shards on two ranks, on Ray: one engine over both, and an engine on each."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.workers.engine.toy import VOCABULARY
from tests.workers.rollout.ranks import Run
from tests.workers.rollout.vllm_hosts import CPU_BUILD
from workers.controller.ray_backend import RayBackend

pytestmark = CPU_BUILD


@pytest.fixture(scope="module", params=[2, 1], ids=["one engine over two ranks", "two engines"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("run")
    with RayBackend(run_dir=folder, nnodes=1, n_gpus_per_node=2, device="cpu", ray_init={}) as backend:
        run = Run(backend, folder / "model", "vllm", request.param)
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
