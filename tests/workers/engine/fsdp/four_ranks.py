"""Four ranks that go on from what two have saved. One process is spawned and forks: torch is imported once."""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

from tests.workers.engine.fsdp.cases import exported, train
from tests.workers.engine.toy import toy_engine

STEPS = range(2, 4)


def spawned(_: int, directory: str, model: str) -> None:
    torch.set_num_threads(1)
    torch.multiprocessing.start_processes(main, args=(directory, model), nprocs=4, start_method="fork")


def main(rank: int, directory: str, model: str) -> None:
    path = Path(directory)
    dist.init_process_group("gloo", init_method=f"file://{path / 'rendezvous_of_four'}", rank=rank, world_size=4)
    engine = toy_engine(model)
    engine.load(str(path / "checkpoint"))
    loaded = exported(engine)
    metrics = train(engine, STEPS)
    assert engine._optimizer is not None and engine._optimizer.steps == STEPS.stop
    engine.save(str(path / "of_four")).result()
    weights = exported(engine)
    if rank == 0:
        torch.save({"loaded": loaded, "grad_norm": metrics["grad_norm"], "weights": weights}, path / "four.pt")
    dist.destroy_process_group()
