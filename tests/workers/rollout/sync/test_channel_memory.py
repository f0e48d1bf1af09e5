"""How much memory a sync takes on either side of the channel, as the system counts it."""

from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing import get_context, spawn

from scripts.bench.weight_sync import extra_memory
from tests.workers.rollout.engines import make_model, spec_of
from tests.workers.rollout.sync.test_weight_sync_memory import BUCKET, SIZES
from tests.workers.rollout.vllm_workers import CPU_BUILD, actor_spec
from workers.controller.group import WorkerInfo
from workers.controller.ports import free_port
from workers.roles.worker import Worker

pytestmark = CPU_BUILD


def main(engine: int, path: str, ports: list[int], offers: "SimpleQueue[Any]") -> None:
    """The trainer, or the engine. Three syncs, of which the last is measured."""
    torch.set_num_threads(1)
    worker = Worker(WorkerInfo(0, 1, 0, 0, "127.0.0.1", ports[engine]), "cpu", 600.0)
    spec = spec_of(path, slots=4, update_weights_bucket_megabytes=BUCKET, verify_weights="full")
    if engine:
        worker.build_rollout_apart("rollout", spec, offers.get())
        syncs = [lambda version=version: worker.roles["rollout"].sync_weights(version) for version in range(3)]
    else:
        worker.build_model("actor", actor_spec(spec.model), None)
        offers.put(worker.offer_weights("actor", 1))
        syncs = [lambda: worker.roles["actor"].send_weights()] * 3
    syncs[0]()
    syncs[1]()
    torch.save(extra_memory(syncs[2]), f"{path}/{engine}.pt")
    worker.close()


@pytest.mark.soak
def test_two_buckets_are_not_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(tmp_path, **SIZES)
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")  # what is freed goes back to the system at once
    spawn(main, args=(str(tmp_path), [free_port(), free_port()], get_context("spawn").SimpleQueue()), nprocs=2)
    taken = [torch.load(tmp_path / f"{engine}.pt") / 2**20 for engine in range(2)]
    print("MiB of trainer, engine:", [round(value, 1) for value in taken])
    assert all(2 < value <= 2 * BUCKET for value in taken)
    assert sum(weight.nbytes for weight in model.parameters()) > 4 * BUCKET * 2**20
