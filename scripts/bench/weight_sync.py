"""Bytes per second of a whole weight sync, compared with memcpy and with the engine's bare update call, as one table.

    python scripts/bench/weight_sync.py                                # every engine, 84M parameters, one rank
    python scripts/bench/weight_sync.py --ranks 2 --engines vllm       # from FSDP2 shards of two ranks into an engine on each
    python scripts/bench/weight_sync.py --apart                        # and into engines on as many ranks of their own
    python scripts/bench/weight_sync.py --quick                        # a smoke version

Weights go from a training engine into a colocated rollout engine that stays awake. bare: the engine's own call on tensors that
are already gathered, cast, and in place (vLLM: reload_weights; SGLang: update_weights_from_tensor in shared memory, and the flush
of its cache). sync: the whole sync with verify_weights=sample. apart: the same, into another engine in other processes. Rounds
alternate; medians of seconds. verify: the mean fraction of a sync. peak: the maximum memory of the process in a sync, as the
system counts it, above its size before or after. With one rank the embedded engine would share the trainer's tensors and copy
nothing: here it is made to copy.
"""

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.queues import SimpleQueue
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import get_context, spawn
from transformers import Qwen2Config, Qwen2ForCausalLM

from configs.compose import compose
from configs.schema.common import FSDPConfig
from configs.schema.ppo import PPOConfig
from workers.controller.group import WorkerInfo
from workers.controller.ports import free_port
from workers.engine.base import EngineSpec, TrainEngine
from workers.engine.hf.hf_model import DTYPES
from workers.metric import Metric
from workers.roles.model_role import ModelRole
from workers.roles.rollout_role import RolloutRole
from workers.roles.worker import Worker
from workers.rollout.base import Rollout, RolloutSpec
from workers.rollout.sglang.sglang_client import SharedBucket
from workers.rollout.sglang.sglang_engine import SGLangRollout
from workers.rollout.sync.channel import Rendezvous
from workers.rollout.sync.weight_sync import WeightSync
from workers.rollout.vllm.vllm_engine import VLLMRollout

SIZES: dict[str, Any] = {"hidden_size": 512, "num_hidden_layers": 12, "intermediate_size": 2048, "vocab_size": 32768,
                         "num_attention_heads": 8, "num_key_value_heads": 8}  # fmt: skip
QUICK: dict[str, Any] = {"hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 256, "vocab_size": 500,
                         "num_attention_heads": 4, "num_key_value_heads": 4}  # fmt: skip
COLUMNS = ("engine", "dtype", "ranks", "MB", "memcpy GB/s", "bare GB/s", "sync GB/s", "sync/bare", "sync/memcpy", "verify %",
           "full s", "bucket MB", "peak MB", "apart GB/s", "apart/sync")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=["embedded", "vllm", "sglang"], help="(default: %(default)s)")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=DTYPES, help="of the engine")
    parser.add_argument("--ranks", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--tensor_model_parallel_size", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--bucket", type=int, default=64, help="update_weights_bucket_megabytes (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=16, help="(default: %(default)s)")
    parser.add_argument("--apart", action="store_true", help="engines on ranks of their own too")
    parser.add_argument("--quick", action="store_true", help="a tiny model, two rounds")
    args = parser.parse_args()
    if args.quick:
        args.rounds = 2
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        Qwen2ForCausalLM(Qwen2Config(**(QUICK if args.quick else SIZES), tie_word_embeddings=False)).save_pretrained(folder)
        for engine in args.engines:
            for dtype in args.dtypes:
                ports, offers = (free_port(), free_port()), get_context("spawn").SimpleQueue()
                spawn(measure, args=(args, folder, engine, dtype, ports, offers), nprocs=args.ranks * (1 + args.apart))


class UnsharedTrainer:
    """Training engine that does not share its tensors, so that the rollout engine copies them."""

    def __init__(self, engine: TrainEngine) -> None:
        self.export_weights = engine.export_weights

    def live_weights(self) -> None:
        return None


def measure(
    rank: int,
    args: argparse.Namespace,
    folder: str,
    engine: str,
    dtype: str,
    ports: Sequence[int],
    offers: "SimpleQueue[Rendezvous]",
) -> None:
    """Print one line of the table, from rank 0. Ranks beyond the trainer's have only a rollout engine."""
    spec = rollout_spec(args, folder, engine, dtype)
    if rank >= args.ranks:
        return receive(rank - args.ranks, args, spec, ports[1], offers)
    worker = Worker(WorkerInfo(rank, args.ranks, rank, 0, "127.0.0.1", ports[0]), "cpu", 1800.0)
    worker.build_model("actor", trainer_spec(spec), None)
    worker.build_rollout("rollout", spec, "actor")
    actor, role = worker.roles["actor"], worker.roles["rollout"]
    assert isinstance(actor, ModelRole) and isinstance(role, RolloutRole)
    worker.memory_scheduler.enter("sync", "actor")
    source: Any = UnsharedTrainer(actor.engine)
    sampling = WeightSync(role.rollout, source, replace(spec.rollout, verify_weights="sample"), rank)
    reading_all = WeightSync(role.rollout, source, replace(spec.rollout, verify_weights="full"), rank)
    ready = [(name, weight.to(DTYPES[spec.rollout.dtype], copy=True)) for name, weight in actor.engine.export_weights()]
    copies = [torch.empty_like(weight) for _, weight in ready]
    nbytes = sum(weight.nbytes for weight in copies)
    verified: list[float] = []

    def memcpy() -> None:
        for copy, (_, weight) in zip(copies, ready, strict=True):
            copy.copy_(weight)

    def sync() -> None:
        found = sampling(0)[1]["timing_s/verify_weights"]
        assert isinstance(found, Metric)
        verified.append(found.value)

    bare = bare_call(role.rollout, ready, DTYPES[spec.rollout.dtype])
    contenders: dict[str, Callable[[], None]] = {"memcpy": memcpy, "bare": bare, "sync": sync}
    if args.apart:
        meeting = worker.offer_weights("actor", args.ranks)
        for _ in range(args.ranks if meeting is not None else 0):
            offers.put(meeting)
        contenders["apart"] = actor.send_weights
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(args.rounds + 1):
        for name, run in contenders.items():
            times[name].append(seconds(run))
    full = seconds(lambda: reading_all(0))
    ready, copies = [], []
    contenders["bare"] = bare = sync  # lets go of what it holds
    peak = extra_memory(lambda: sampling(0))
    worker.close()
    if rank == 0:
        middle = {name: statistics.median(of[1:]) for name, of in times.items()}  # the first round warms up
        row = (
            engine, dtype, args.ranks, f"{nbytes / 1e6:.0f}",
            *(f"{nbytes / 1e9 / middle[name]:.2f}" for name in ("memcpy", "bare", "sync")),
            f"{middle['bare'] / middle['sync']:.2f}", f"{middle['memcpy'] / middle['sync']:.2f}",
            f"{100 * sum(verified[1:]) / sum(times['sync'][1:]):.1f}", f"{full:.2f}", args.bucket, f"{peak / 2**20:.0f}",
            *((f"{nbytes / 1e9 / middle['apart']:.2f}", f"{middle['sync'] / middle['apart']:.2f}") if args.apart else ("", "")),
        )  # fmt: skip
        print("| " + " | ".join(map(str, row)) + " |", flush=True)


def receive(rank: int, args: argparse.Namespace, spec: RolloutSpec, port: int, offers: "SimpleQueue[Rendezvous]") -> None:
    """Run a rollout engine with GPUs of its own, which gets weights as often as the trainer sends them."""
    worker = Worker(WorkerInfo(rank, args.ranks, rank, 0, "127.0.0.1", port), "cpu", 1800.0)
    worker.build_rollout_apart("rollout", spec, offers.get())
    for version in range(args.rounds + 1):
        worker.roles["rollout"].sync_weights(version)
    worker.close()


def rollout_spec(args: argparse.Namespace, folder: str, engine: str, dtype: str) -> RolloutSpec:
    overrides = [
        f"rollout={engine}", f"actor_rollout_ref.model.path={folder}", f"actor_rollout_ref.rollout.dtype={dtype}",
        "actor_rollout_ref.rollout.max_num_seqs=16", "actor_rollout_ref.rollout.free_cache_engine=false",
        f"actor_rollout_ref.rollout.tensor_model_parallel_size={args.tensor_model_parallel_size}",
        f"actor_rollout_ref.rollout.update_weights_bucket_megabytes={args.bucket}",
    ]  # fmt: skip
    models = compose("ppo_trainer", PPOConfig, overrides).actor_rollout_ref
    return RolloutSpec(models.model, models.rollout, max_model_len=256, device="cpu")


def trainer_spec(spec: RolloutSpec) -> EngineSpec:
    """Spec of a float32 engine without optimizer, sharded over all ranks."""
    fsdp = FSDPConfig(
        model_dtype="float32",
        dtype="float32",
        reshard_after_forward=True,
        use_no_sync_for_gradient_accumulation=False,
        use_torch_compile=False,
        param_offload=False,
        optimizer_offload=False,
        fsdp_size=-1,
        ulysses_sequence_parallel_size=1,
    )
    return EngineSpec(model=spec.model, head="lm", sharding=fsdp, optimizer=None, device="cpu", seed=0)


def bare_call(rollout: Rollout, ready: Sequence[tuple[str, Tensor]], dtype: torch.dtype) -> Callable[[], None]:
    """The engine's own update call, on tensors that are ready for it."""
    if isinstance(rollout, VLLMRollout):
        return lambda: rollout._on_worker("reload_weights", weights_iterator=iter(ready))
    if isinstance(rollout, SGLangRollout) and rollout.engine is not None:
        client, there = rollout.engine, SharedBucket(2, rollout.device, dtype).views(ready)

        def update() -> None:
            client.call("begin_update")
            client.call("update", [bytes(ForkingPickler.dumps(there)) for _ in range(rollout.tensor_parallel_size)])
            client.call("end_update")
            client.call("flush")

        return update
    return lambda: rollout.load_weights(iter(ready), 0)


def seconds(run: Callable[[], Any]) -> float:
    """Seconds of ``run`` until all ranks have ended; all start together."""
    dist.barrier()
    start = time.perf_counter()
    run()
    dist.barrier()
    return time.perf_counter() - start


def extra_memory(run: Callable[[], Any]) -> int:
    """Peak bytes of memory during ``run`` above the size before or after it (Linux's VmHWM). Call ``run`` once before."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = status("VmRSS")
    run()
    return status("VmHWM") - max(before, status("VmRSS"))


def status(name: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


if __name__ == "__main__":
    main()
