"""A rank that skips a collective is named, with the collective: gloo on CPU, NCCL on two GPUs."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.trainer.skipped_collective import SCENARIOS, at_the_phases_limit
from workers.controller.ray.ray_backend import RayBackend


@pytest.fixture(scope="module")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RayBackend, Path]]:
    folder = tmp_path_factory.mktemp("run")
    with RayBackend(run_dir=folder, nnodes=1, n_gpus_per_node=2, device="cuda", ray_init={}) as backend:
        yield backend, folder


@pytest.mark.soak
def test_rank_that_skips_a_gloo_collective_is_named(tmp_path: Path) -> None:
    """Other faults of gloo ranks, and behaviour at the collective's own limit, are in test_watchdog_ray.py."""
    with RayBackend(run_dir=tmp_path, nnodes=1, n_gpus_per_node=2, device="cpu", ray_init={}) as backend:
        at_the_phases_limit(backend, tmp_path, "cpu")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_rank_that_skips_an_nccl_collective_is_named(
    scenario: Callable[[RayBackend, Path, str], None], cuda: tuple[RayBackend, Path]
) -> None:
    scenario(*cuda, "cuda")
