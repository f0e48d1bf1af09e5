"""Tokens per second of a train step and of a forward, by training engine and parallel layout, on random weights, as JSON.

    python scripts/bench/engines.py fsdp dp2 tp2 pp2 cp2 --shape 0.5b          # two GPUs
    python scripts/bench/engines.py fsdp megatron --shape tiny --device cpu    # the smoke version

Each case has its own processes. fsdp2 is FSDP on two ranks, fsdp2.sp2 with Ulysses over both, fsdp2.shard1 a copy on each.
one, tp2, pp2, dp2, cp2 are Megatron's parallel dimensions, joined by dots (tp2.dp2); the suffix -local: without Transformer
Engine. x: tokens per second and GPU of a train step, relative to the first case.
"""

import argparse
import faulthandler
import json
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from transformers import AutoModelForCausalLM

from configs.compose import compose
from configs.schema.ppo import PPOConfig
from scripts.bench.shapes import ADAMW, SHAPES, Likelihood, qwen2, random_rows
from trainer.tracking.metrics import peak_flops
from workers.engine.base import EngineSpec
from workers.plan import Limits, make_plan
from workers.roles.train_engines import make_engine

SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
}
SHARING = {"sp": "ulysses_sequence_parallel_size", "shard": "fsdp_size"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, default=64, help="a GPU")
    parser.add_argument("--length", type=int, default=1024, help="of the longest row; the others are down to a quarter of it")
    parser.add_argument("--micro_batch", type=int, default=16384, help="tokens at most")
    parser.add_argument("--steps", type=int, default=5, help="measured steps, after one for warm-up")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--eager", action="store_true", help="FSDP: fsdp_config.use_torch_compile=false")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        args.model = f"{folder}/model"
        torch.multiprocessing.spawn(save_model, args=(args.shape, args.device, args.model))  # its device memory ends with it
        found = {case: measure(case, args, Path(folder)) for case in args.cases}
    first = next(iter(found.values()))["tokens_per_second_per_gpu"]
    for result in found.values():
        result["x"] = round(result["tokens_per_second_per_gpu"] / first, 2)
    settings = {name: value for name, value in vars(args).items() if name not in ("cases", "model")}
    print(json.dumps({"settings": settings, **found}, indent=1))


def save_model(rank: int, shape: str, device: str, path: str) -> None:
    torch.manual_seed(0)
    with torch.device(device):
        AutoModelForCausalLM.from_config(qwen2(shape), dtype=torch.float32).save_pretrained(path)


def sizes_of(case: str) -> tuple[list[str], int]:
    """Overrides of the configuration, and the number of ranks."""
    overrides, ranks = [], 1
    cuts, _, local = case.partition("-")
    for kind, number in re.findall(r"([a-z]+)(\d*)", cuts):
        size = int(number or 1)
        ranks *= 1 if kind in ("vpp", *SHARING) else size
        if kind in SHARING:
            overrides.append(f"actor_rollout_ref.actor.fsdp_config.{SHARING[kind]}={size}")
        elif kind in SIZES:
            overrides.append(f"actor_rollout_ref.actor.megatron.{SIZES[kind]}={size}")
    if local:
        overrides.append(f"+actor_rollout_ref.actor.megatron.override_transformer_config.transformer_impl={local}")
    return [f"actor_rollout_ref.actor.strategy={'fsdp' if cuts.startswith('fsdp') else 'megatron'}", *overrides], ranks


def measure(case: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    ranks = sizes_of(case)[1]
    torch.multiprocessing.spawn(work, args=(case, args, folder), nprocs=ranks)
    found: dict[str, Any] = json.loads((folder / f"{case}.json").read_text())
    return found


def work(rank: int, case: str, args: argparse.Namespace, folder: Path) -> None:
    overrides, ranks = sizes_of(case)
    backend = "gloo"
    faulthandler.dump_traceback_later(300, exit=True)  # of a case, compilation included
    torch.set_num_threads(1)
    if args.device == "cuda":
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{folder / f'{case}.rendezvous'}", rank=rank, world_size=ranks)
    models = compose(
        "ppo_trainer",
        PPOConfig,
        [
            f"actor_rollout_ref.model.path={args.model}",
            f"actor_rollout_ref.model.enable_gradient_checkpointing={str(args.recompute).lower()}",
            f"actor_rollout_ref.actor.fsdp_config.dtype={args.dtype}",
            f"actor_rollout_ref.actor.megatron.dtype={args.dtype}",
            *(["actor_rollout_ref.actor.fsdp_config.use_torch_compile=false"] if args.eager else []),
            *overrides,
        ],
    ).actor_rollout_ref
    engine = make_engine(EngineSpec(models.model, "lm", models.actor.sharding, ADAMW, args.device, 0))
    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(args.length // 4, args.length + 1, (args.rows * ranks,), generator=draw)
    total = int(lengths.sum())
    batch = random_rows(args.shape, lengths.tolist())
    plan = make_plan(lengths.tolist(), engine.mesh.dp_size, Limits(max_tokens=args.micro_batch), attention_cost=0.0)
    share, cut = plan.split(batch)[engine.mesh.dp_rank], plan.micro_batches[engine.mesh.dp_rank]
    train = timed(lambda: engine.train_step(share, cut, Likelihood()), args)
    forward = timed(lambda: engine.forward(share, cut, {"log_probs"}), args)
    found = {
        "gpus": ranks,
        "micro_batches": len(cut),
        "tokens_per_second_per_gpu": round(total / train / ranks),
        "forward_tokens_per_second_per_gpu": round(total / forward / ranks),
    }
    if args.device == "cuda":
        peak, flops = peak_flops("cuda"), engine.flops(lengths.tolist(), backward=True)
        found["mfu"] = round(flops / train / ranks / peak, 3) if peak is not None else None
        found["gigabytes"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
    if rank == 0:
        (folder / f"{case}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


def timed(work: Callable[[], object], args: argparse.Namespace) -> float:
    """Median seconds, all ranks together."""
    seconds = []
    for _ in range(args.steps + 1):
        dist.barrier()
        start = time.perf_counter()
        work()
        if args.device == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


if __name__ == "__main__":
    main()
