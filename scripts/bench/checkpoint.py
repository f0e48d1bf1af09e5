"""Cost of a checkpoint: how long training waits, how fast it is written, how long a resume takes, as JSON.

    python scripts/bench/checkpoint.py --shape 7b --device cuda --ranks 2    # 91 GB on disk and in the host's memory
    python scripts/bench/checkpoint.py --shape 84m --device cpu --export     # the smoke version

FSDP on random weights: parameters and both moments in float32, 12 bytes per parameter. GB is 10^9 bytes; seconds are those of
the slowest rank. check: hashes of all files, compared; load: into the engine that saved, after its tensors were set to zero;
bits: whether all tensors are bitwise identical again. export: the weights as a Hugging Face directory in float32, in a separate
process; its memory is the peak resident size.
"""

import argparse
import faulthandler
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from threading import Thread
from typing import Any, Self
from unittest import mock

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing

from configs.compose import compose
from configs.schema.ppo import PPOConfig
from scripts.bench.shapes import ADAMW, SHAPES, qwen2
from trainer.checkpoint.export import check, export
from workers.engine.base import EngineSpec, Saved
from workers.engine.fsdp import fsdp_engine as fsdp
from workers.engine.fsdp.sharding import local
from workers.engine.saving import hashes_of


class Peak:
    """Peak of this process's anonymous memory, in GB above its start; the page cache is excluded, the kernel can drop it."""

    def __enter__(self) -> Self:
        self.before = self.most = self._now()
        self.open = True
        self.thread = Thread(target=self._watch)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.open = False
        self.thread.join()

    @property
    def more(self) -> float:
        return round((self.most - self.before) / 1e9, 3)

    def _now(self) -> int:
        (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
        return int(line.split()[1]) * 1024

    def _watch(self) -> None:
        while self.open:
            self.most = max(self.most, self._now())
            time.sleep(0.002)


def exported(source: str, target: str) -> dict[str, float]:
    """Seconds and GB of an export and of its check; runs in a separate process."""
    Path(target).mkdir()
    started = time.perf_counter()
    with Peak() as exporting:
        export(Path(source), Path(target))
    exported_at = time.perf_counter()
    with Peak() as checking:
        check(Path(target))
    return {
        "seconds": round(exported_at - started, 2), "GB": exporting.more,
        "seconds of the check": round(time.perf_counter() - exported_at, 2), "GB of the check": checking.more,
    }  # fmt: skip


def built(args: argparse.Namespace, folder: Path) -> fsdp.FSDPEngine:
    """Build an engine with random weights and moments, generated on the device."""
    models = compose(
        "ppo_trainer",
        PPOConfig,
        [f"actor_rollout_ref.model.path={folder}/model", "actor_rollout_ref.actor.fsdp_config.model_dtype=float32"],
    ).actor_rollout_ref
    sharding = models.actor.fsdp_config
    with mock.patch.object(fsdp, "load_model", return_value=None):
        engine = fsdp.FSDPEngine(EngineSpec(models.model, "lm", sharding, ADAMW, args.device, 0), sharding)
    torch.manual_seed(dist.get_rank())
    for tensor in tensors(engine):
        tensor.normal_()
    return engine


def tensors(engine: fsdp.FSDPEngine) -> list[torch.Tensor]:
    return [local(tensor) for tensor in engine._checkpoint_state().values() if tensor.is_floating_point()]


def sums(engine: fsdp.FSDPEngine) -> list[int]:
    """Sum of the bits of each tensor, as int32."""
    return [int(tensor.view(torch.int32).sum()) for tensor in tensors(engine)]


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of the slowest rank, and what ``work`` returns."""
    dist.barrier()
    started = time.perf_counter()
    found = work()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return slowest(time.perf_counter() - started), found


def slowest(seconds: float) -> float:
    most = torch.tensor(seconds)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return round(float(most), 2)


def gathered(mine: Any) -> list[Any]:
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def evict(folder: Path) -> None:
    """Drop the folder's files from the page cache, so that they are read from disk."""
    for file in folder.iterdir():
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def work(rank: int, args: argparse.Namespace, folder: Path) -> None:
    faulthandler.dump_traceback_later(args.limit, exit=True)
    torch.set_num_threads(1)
    cuda = args.device == "cuda"
    if cuda:
        torch.cuda.set_device(rank)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=args.ranks)
    building, engine = timed(lambda: built(args, folder))
    report: dict[str, Any] = {"settings": vars(args), "build": building, "saves": []}
    before, directory = sums(engine), folder / "checkpoint"
    for _ in range(args.saves):
        if rank == 0:
            shutil.rmtree(directory, ignore_errors=True)
        waits, saving = timed(lambda: engine.save(str(directory), background=True))
        if rank == 0:
            print(f"training waited {waits} s", flush=True)
        taken = psutil.virtual_memory().used
        whole = Saved.join(gathered(saving.result()))
        size = whole.bytes / 1e9
        seconds = round(whole.seconds, 2)
        report["saves"].append(
            {"training waits": waits, "written in": seconds, "GB": round(size, 2), "GB/s": round(size / seconds, 2),
             "GB of the host in use": round(taken / 1e9, 1), "waited for": whole.waited_for}
        )  # fmt: skip
        if rank == 0:
            print(json.dumps(report["saves"][-1]), flush=True)
    for tensor in tensors(engine):
        tensor.zero_()
    if args.cold and rank == 0:
        evict(directory)
    names = sorted(file.name for file in whole.files if file.name.endswith(".safetensors"))
    start, end = (len(names) * k // args.ranks for k in (rank, rank + 1))
    checking, found = timed(lambda: hashes_of(directory, names[start:end]))
    loading, _ = timed(lambda: engine.load(str(directory)))
    hashes = {name: sha256 for part in gathered(found) for name, sha256 in part.items()}
    assert hashes == {file.name: file.sha256 for file in whole.files if file.name in hashes} and len(hashes) == len(names)
    same = all(gathered(sums(engine) == before))
    both = round(checking + loading, 2)
    report["resume"] = {"check": checking, "load": loading, "both": both, "files": len(names), "bits": same}
    dist.destroy_process_group()
    if rank == 0:
        if args.export:
            with get_context("spawn").Pool(1) as pool:
                report["export"] = pool.apply(exported, (str(directory), f"{folder}/exported"))
            report["export"]["GB of weights"] = round(Path(folder, "exported/model.safetensors").stat().st_size / 1e9, 3)
        print(json.dumps(report, indent=1))
    faulthandler.cancel_dump_traceback_later()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="84m")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--saves", type=int, default=2, help="number of saves, each of which replaces the one before")
    parser.add_argument("--cold", action="store_true", help="drop the files from the page cache before they are checked")
    parser.add_argument("--export", action="store_true")
    parser.add_argument("--folder", help="where to write; a temporary directory")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds, then it ends with its stacks")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        qwen2(args.shape).save_pretrained(f"{folder}/model")
        Path(folder, "model/model.safetensors").touch()
        torch.multiprocessing.spawn(work, args=(args, Path(folder)), nprocs=args.ranks)


if __name__ == "__main__":
    main()
