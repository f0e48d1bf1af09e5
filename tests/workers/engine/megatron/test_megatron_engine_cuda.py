"""The same engine on GPUs: NCCL, other attention kernels, real moves. Left out where there are no two GPUs."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch import Tensor

from tests.workers.engine.fsdp.cases import exported, train, training_batch
from tests.workers.engine.fsdp.test_fsdp_engine_parity import plain_training
from tests.workers.engine.megatron.cases import answers, megatron_engine, ranks
from tests.workers.engine.toy import plain_model, plain_outputs

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
CUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp2 sp recomputed": {"tp": 2, "sequence_parallel": True, "recompute": True},
    "tp2 sp without Transformer Engine": {
        "tp": 2,
        "sequence_parallel": True,
        "override_transformer_config": {"transformer_impl": "local"},
    },
    "pp2": {"pp": 2},
    "dp2 distributed": {"use_distributed_optimizer": True},
    "cp2": {"cp": 2},
}
BOUNDS = {"float32": 1e-4, "bfloat16": 0.1}


def main(rank: int, directory: str, models: dict[str, str]) -> None:
    path, found = Path(directory), {}
    torch.cuda.set_device(rank)
    torch.backends.cuda.matmul.allow_tf32 = False
    for dtype in BOUNDS:
        for name, changes in CUTS.items():
            with ranks(path, f"{dtype} {name}", rank, 2, "cpu:gloo,cuda:nccl"):
                engine = megatron_engine(models["qwen2"], device="cuda", dtype=dtype, **changes)
                found[dtype, name] = {
                    "is_output_rank": engine.mesh.is_output_rank,
                    "answers": answers(engine, training_batch(0), {"log_probs", "entropy"}, max_tokens=80),
                    "metrics": train(engine, range(5)),
                    "weights": {key: weight.float().cpu() for key, weight in exported(engine).items()},
                }
    with ranks(path, "moves", rank, 2, "cpu:gloo,cuda:nccl"):
        found["moves"] = moves(models["qwen2"])
    torch.save(found, path / f"{rank}.pt")


def moves(model: str) -> dict[str, Any]:
    """Bytes given back, and whether what came back was the same."""
    found = {}
    for distributed in (False, True):
        options: dict[str, Any] = {"grad_offload": True, "use_distributed_optimizer": distributed, "dtype": "bfloat16"}
        engine = megatron_engine(model, device="cuda", **options)
        train(engine, range(2))
        before, state = exported(engine), {name: part.clone() for name, (part, _) in engine._state().items()}
        taken = torch.cuda.memory_allocated()
        engine.move(params="cpu", grads="cpu", optimizer="cpu")
        given = taken - torch.cuda.memory_allocated()
        engine.move(params="device", grads="device", optimizer="device")
        same = [torch.equal(weight, before[name]) for name, weight in exported(engine).items()]
        same += [torch.equal(part, state[name]) for name, (part, _) in engine._state().items()]
        train(engine, range(2, 3))
        found[distributed] = {"given": given, "same": all(same), "parameters": sum(weight.numel() for weight in before.values())}
    return found


@pytest.fixture(scope="module")
def found(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    path = tmp_path_factory.mktemp("cuda")
    torch.multiprocessing.spawn(main, args=(str(path), models), nprocs=2)
    return [torch.load(path / f"{rank}.pt", map_location="cpu", weights_only=True) for rank in range(2)]


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
    answering = [rank for rank in here if rank["is_output_rank"]]
    torch.testing.assert_close(sum(rank["metrics"]["loss"] for rank in answering), plain[0]["loss"], rtol=0, atol=bound)
    model = plain_model(models["qwen2"])
    for rank in here:
        torch.testing.assert_close(rank["metrics"]["grad_norm"], plain[0]["grad_norm"], rtol=bound, atol=0)
        apart = {key: float((weight - plain[1][key]).abs().max()) for key, weight in rank["weights"].items()}
        assert {key: value for key, value in apart.items() if not value <= bound} == {}
    for answer in (rank["answers"] for rank in answering):
        columns = [
            answer[key].split(answer["lengths"].tolist()) for key in ("input_ids", "response_mask", "log_probs", "entropy")
        ]
        for ids, mask, log_probs, entropy in zip(*columns, strict=True):
            with torch.no_grad():
                wanted = plain_outputs(model, ids, 0.7)
            for actual, expected in zip((log_probs, entropy), wanted, strict=True):
                assert ((actual[1:] - expected).abs() * mask[1:]).max() <= bound


@pytest.mark.parametrize("distributed", [False, True])
def test_offloading_frees_memory_and_restores_bitwise(found: list[dict[Any, Any]], distributed: bool) -> None:
    """bfloat16 parameters, float32 gradients, and the optimizer's three float32 copies, or this rank's half of them."""
    for rank in found:
        moved = rank["moves"][distributed]
        assert moved["same"]
        assert moved["given"] >= moved["parameters"] * (2 + 4 + (6 if distributed else 12))
