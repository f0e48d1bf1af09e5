"""Ulysses and copies on GPUs: NCCL, and other attention kernels. Left out where there are no two GPUs."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

from tests.workers.engine.fsdp.cases import exported, train, training_batch
from tests.workers.engine.fsdp.four_ranks import answered
from tests.workers.engine.fsdp.test_fsdp_engine_parity import plain_training
from tests.workers.engine.toy import plain_model, plain_outputs, toy_engine

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
CUTS: dict[str, dict[str, int]] = {
    "ulysses 2": {"ulysses_sequence_parallel_size": 2},
    "ulysses 2, compiled": {"ulysses_sequence_parallel_size": 2, "use_torch_compile": True},
    "compiled": {"use_torch_compile": True},
    "hsdp 2x1": {"fsdp_size": 1},
    "hsdp 2x1 ulysses 2": {"fsdp_size": 1, "ulysses_sequence_parallel_size": 2},
}
BOUNDS = {"float32": 1e-4, "bfloat16": 0.1}


def main(rank: int, directory: str, models: dict[str, str], device: str = "cuda") -> None:
    path, found = Path(directory), {}
    if device == "cuda":
        torch.cuda.set_device(rank)
        torch.backends.cuda.matmul.allow_tf32 = False
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{path / 'rendezvous'}", rank=rank, world_size=2)
    for dtype in BOUNDS:
        for name, changes in CUTS.items():
            engine = toy_engine(models["qwen2"], dtype=dtype, model_dtype="float32", device=device, **changes)
            found[dtype, name] = {
                "answers": answered(engine, training_batch(0), {"log_probs", "entropy"}, max_tokens=80),
                "metrics": train(engine, range(5)),
                "weights": {key: weight.cpu() for key, weight in exported(engine).items()},
            }
    torch.save(found, path / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    path = tmp_path_factory.mktemp("cuda")
    torch.multiprocessing.spawn(main, args=(str(path), models), nprocs=2)
    return [torch.load(path / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.fixture(scope="module")
def plain(models: dict[str, str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return plain_training(models["qwen2"], 5)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", CUTS)
def test_training(
    found: list[dict[Any, Any]], plain: tuple[dict[str, Tensor], dict[str, Tensor]], models: dict[str, str], name: str, dtype: str
) -> None:
    """Against plain code on the CPU, in float32."""
    here, bound = [rank[dtype, name] for rank in found], BOUNDS[dtype]
    answering = [rank for rank in here if rank["answers"] is not None]
    assert len(answering) == (1 if "ulysses" in name else 2)
    torch.testing.assert_close(sum(rank["metrics"]["loss"] for rank in answering), plain[0]["loss"], rtol=0, atol=bound)
    for rank in here:
        torch.testing.assert_close(rank["metrics"]["grad_norm"], plain[0]["grad_norm"], rtol=bound, atol=0)
        apart = {key: float((weight - plain[1][key]).abs().max()) for key, weight in rank["weights"].items()}
        assert {key: value for key, value in apart.items() if not value <= bound} == {}
    model = plain_model(models["qwen2"])
    for answer in (rank["answers"] for rank in answering):
        lengths = answer["lengths"].tolist()
        columns = (answer[key].split(lengths) for key in ("input_ids", "response_mask", "log_probs", "entropy"))
        for ids, mask, log_probs, entropy in zip(*columns, strict=True):
            with torch.no_grad():
                wanted = plain_outputs(model, ids, 0.7)
            for actual, expected in zip((log_probs, entropy), wanted, strict=True):
                assert ((actual[1:] - expected).abs() * mask[1:]).max() <= bound
