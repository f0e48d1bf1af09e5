"""How much memory a sync takes in addition to the engine's own, on two ranks, as the system counts it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing import spawn

from scripts.bench.weight_sync import extra_memory
from tests.workers.rollout.engines import make_model, spec_of
from tests.workers.rollout.vllm_workers import CPU_BUILD, actor_spec
from workers.controller.actor import free_port
from workers.controller.group import WorkerInfo
from workers.roles.rollout_role import RolloutRole
from workers.roles.worker import Worker

pytestmark = CPU_BUILD

BUCKET = 8  # MB; the embedding and the head have 7
SIZES: dict[str, object] = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 8,
                            "intermediate_size": 1024, "vocab_size": 7000}  # fmt: skip


CASES: tuple[tuple[Any, Any], ...] = (("embedded", "sample"), ("embedded", "full"), ("vllm", "sample"))


def main(rank: int, path: str, ports: list[int]) -> None:
    torch.set_num_threads(1)
    found = {
        case: measure(WorkerInfo(rank, 2, rank, 0, "127.0.0.1", port), path, *case)
        for case, port in zip(CASES, ports, strict=True)
    }
    torch.save(found, Path(path) / f"found_{rank}.pt")


def measure(place: WorkerInfo, path: str, engine: Any, verify: Any) -> tuple[int, int]:
    """Bytes that a sync takes, and that all gathered weights together take."""
    worker = Worker(place, "cpu", 600.0)
    spec = spec_of(path, name=engine, slots=4, update_weights_bucket_megabytes=BUCKET, verify_weights=verify)
    worker.build_model("actor", actor_spec(spec.model), None)
    worker.build_rollout("rollout", spec, "actor")
    role = worker.roles["rollout"]
    assert isinstance(role, RolloutRole)
    role.sync_weights(0)
    role.sync_weights(1)
    in_buckets = extra_memory(lambda: role.sync(2))
    at_once = extra_memory(lambda: list(role.sync.source.export_weights()))
    worker.close()
    return in_buckets, at_once


@pytest.mark.soak
def test_two_buckets_are_not_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is freed goes back to the system at once: the C library keeps nothing for later."""
    model = make_model(tmp_path, **SIZES)
    total = sum(weight.nbytes for weight in model.parameters())
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    spawn(main, args=(str(tmp_path), [free_port() for _ in CASES]), nprocs=2)
    for rank in range(2):
        found = torch.load(tmp_path / f"found_{rank}.pt")
        print({case: [round(value / 2**20, 1) for value in values] for case, values in found.items()})
        for case, (in_buckets, at_once) in found.items():
            assert in_buckets <= 2 * BUCKET * 2**20, case
            assert at_once > 0.7 * total, f"{case}: what is measured is there to be measured"
