"""Rates of this machine for the planner's time model, as a file for `cluster=NODESxGPUSxFILE.yaml`; under two minutes.

    python scripts/bench/calibrate.py --output here.yaml                                      # CPU
    python scripts/bench/calibrate.py --device cuda --base h200 --engine vllm --output here.yaml

Measured: matrix products, memory bandwidth, elementwise kernels, attention, the FSDP engine's products and launches, collectives
between this machine's GPUs (CPU: two processes), decode steps of a rollout engine. What is not measured is copied from --base
with its source. On the CPU, which may be shared, seconds are CPU seconds of one thread. An entry that was measured says so.
"""

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import fields, replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing
import yaml
from torch.nn.functional import scaled_dot_product_attention
from transformers import Qwen2ForCausalLM

from scripts.bench.partial_rollouts import MeasuredEngine
from scripts.bench.rollout_flow import Settings
from scripts.bench.shapes import SHAPES, Likelihood, LoneEngine, qwen2, random_rows
from trainer.planner.hardware import FOLDER, Hardware, SoftwareCosts, load_hardware
from trainer.planner.memory_model import Shape
from trainer.planner.time_model import HEAD_BYTES, Communicator, Decoder, pass_work
from workers.controller.group import WorkerInfo

SIZES = {  # by device: model, rows x tokens of its pass, sides of products, numbers of a copy, sequences of a decode step
    "cpu": ("3m", (16, 128), 1024, 1 << 25, 64),
    "cuda": ("1.5b", (16, 1024), 8192, 1 << 30, 256),
}
REPEATS = 5


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=SIZES, default="cpu", help="(default: %(default)s)")
    parser.add_argument("--base", default="cpu", help="hardware from which other values are copied (default: %(default)s)")
    parser.add_argument("--engine", default="embedded", help="rollout engine to measure (default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    base = load_hardware(args.base)
    if base.device != args.device:
        parser.error(f"--base {args.base}: is of device {base.device}; name one of {args.device}")
    measured = kernels(args.device)
    measured |= collectives(args.device)
    measured |= training(args.device, with_rates(base, measured))
    measured |= decoding(args.device, args.engine, with_rates(base, measured))
    path = FOLDER / f"{args.base.lower()}.yaml" if not args.base.endswith(".yaml") else Path(args.base)
    args.output.write_text(as_yaml(yaml.safe_load(path.read_text()), measured, args.device))
    print(json.dumps({"load": os.getloadavg(), **measured}, indent=1))


def with_rates(base: Hardware, rates: dict[str, float]) -> Hardware:
    software = {name: value for name, value in rates.items() if name in {field.name for field in fields(SoftwareCosts)}}
    return replace(base, software=replace(base.software, **software), **{k: v for k, v in rates.items() if k not in software})


def timed(work: Callable[[], object], device: str) -> float:
    """Median seconds of a call, after one that warms up."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    seconds = []
    for _ in range(REPEATS + 1):
        start = clock()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(clock() - start)
    return median(seconds[1:])


def kernels(device: str) -> dict[str, float]:
    """Peaks of products and of memory, and fractions of them that attention and elementwise kernels reach."""
    name, (rows, length), side, numbers, _ = SIZES[device]
    found: dict[str, float] = {}
    for kind, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        matrix = torch.randn(side, side, device=device).to(dtype)
        found[kind] = 2 * side**3 / timed(lambda matrix=matrix: matrix @ matrix, device)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    source, target = (torch.zeros(numbers, dtype=dtype, device=device) for _ in range(2))
    found["bandwidth"] = 2 * source.nbytes / timed(lambda: target.copy_(source), device)
    # Of activations of the model's own size: a CPU has a part of them in its cache.
    one, other, sums = (
        torch.randn(rows * length, SHAPES[name]["intermediate_size"], device=device, dtype=dtype) for _ in range(3)
    )
    found["streaming"] = 3 * one.nbytes / timed(lambda: torch.add(one, other, out=sums), device) / found["bandwidth"]
    heads = [torch.randn(rows, 8, length, 64, device=device, dtype=dtype) for _ in range(3)]
    flops = 4 * rows * 8 * 64 * length**2 / 2
    peak = found["float32" if device == "cpu" else "bfloat16"]
    found["attention"] = flops / timed(lambda: scaled_dot_product_attention(*heads, is_causal=True), device) / peak
    found["memory"] = float(
        psutil.virtual_memory().total / (os.cpu_count() or 1)
        if device == "cpu"
        else torch.cuda.get_device_properties(0).total_memory
    )
    return found


def collectives(device: str) -> dict[str, float]:
    """Bytes per second of an all-gather between this machine's GPUs, and seconds of one without bytes; {} with one GPU."""
    ranks = 2 if device == "cpu" else torch.cuda.device_count()
    if ranks < 2:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(gather, (ranks, device, folder), nprocs=ranks)
        small, large, size = json.loads(Path(folder, "seconds.json").read_text())
    return {"latency": small, "link": size * (ranks - 1) / ranks / (large - small)}


def gather(rank: int, ranks: int, device: str, folder: str) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "gloo" if device == "cpu" else "nccl"
    dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    found = []
    for numbers in (256, 1 << (22 if device == "cpu" else 28)):
        mine = torch.zeros(numbers // ranks, device=device)
        whole = torch.zeros(numbers, device=device)
        # Wall seconds: most of a collective is waiting.
        seconds = []
        for _ in range(4 * REPEATS):
            dist.barrier()
            start = time.perf_counter()
            dist.all_gather_into_tensor(whole, mine)
            if device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        found.append(median(seconds[1:]))
    if rank == 0:
        Path(folder, "seconds.json").write_text(json.dumps([*found, whole.nbytes]))
    dist.destroy_process_group()


def training(device: str, hardware: Hardware) -> dict[str, float]:
    """Fraction of the peak that products reach in the FSDP engine's forward pass, and its launches per layer.

    A pass over few tokens is all launches; of a pass over many, products are what the model's other terms leave.
    """
    name, (rows, length), *_ = SIZES[device]
    dtype, size = ("float32", 4) if device == "cpu" else ("bfloat16", 2)
    shape = Shape.of(SHAPES[name] | {"head_dim": SHAPES[name]["hidden_size"] // SHAPES[name]["num_attention_heads"]})
    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        engine = LoneEngine(shape=name, device=device, model_dtype=dtype, dtype=dtype).build(Path(folder))
        for lengths in ([8], [length] * rows):
            batch, cut = random_rows(name, lengths), (tuple(range(len(lengths))),)
            seconds[len(lengths)] = timed(lambda batch=batch, cut=cut: engine.forward(batch, cut, {"log_probs"}), device)
            if len(lengths) > 1:
                both = timed(lambda batch=batch, cut=cut: engine.train_step(batch, cut, Likelihood()), device)
        dist.destroy_process_group()
    layer = seconds[1] / shape.layers
    whole = with_rates(hardware, {"products": 1.0, "layer": layer})
    work = pass_work(shape, rows * length, rows * length**2 / 2, size, micro_batches=1, head=True)
    parts = work.seconds(whole, size)
    left = seconds[rows] - sum(parts.values()) + parts["products"]
    print(f"forward {seconds[rows]:.3g} s, update {both:.3g} s; by part at full peak: {parts}", file=sys.stderr)
    return {"layer": layer, "products": parts["products"] / left}


def decoding(device: str, engine: str, hardware: Hardware) -> dict[str, float]:
    """Host work of a decode step and of each sequence: what is left of measured steps without the model's device time."""
    name, _, _, _, slots = SIZES[device]
    size = 4 if device == "cpu" else 2
    settings = Settings(
        prompts=slots, n=1, prompt_tokens=64, max_tokens=1024, slots=slots, replicas=1, oversubmit=1.0, max_age=1, a=0.0, b=0.0,
        c=0.0, train=0.0, steps=1, warm_up=0,
    )  # fmt: skip
    shape = Shape.of(SHAPES[name] | {"head_dim": SHAPES[name]["hidden_size"] // SHAPES[name]["num_attention_heads"]})
    with tempfile.TemporaryDirectory() as folder:
        Qwen2ForCausalLM(qwen2(name)).to(torch.float32 if device == "cpu" else torch.bfloat16).save_pretrained(folder)
        info = WorkerInfo(rank=0, world_size=1, local_rank=0, node_rank=0, master_addr="127.0.0.1", master_port=0)
        with closing(MeasuredEngine(info, settings, engine, device, folder, 0.7)) as measured:  # type: ignore[arg-type]
            measured.sync_weights(0)
            points = measured.costs()["decode"]
    counts, seconds = zip(*points, strict=True)
    if device == "cuda":  # a small model's steps are host work that runs during the kernels
        row, step = np.polyfit(counts, seconds, 1)
        return {"decode": max(0.0, float(step)), "decode_row": max(0.0, float(row))}
    # Each layer is launched, and what a sequence adds beyond products is its cache and its logits.
    free = with_rates(hardware, {"decode_layer": 0.0, "decode_row": 0.0, "reading": math.inf})
    decoder = Decoder(shape, Communicator(1, False, free), slots, size, call_steps=0)
    context = settings.prompt_tokens + settings.max_tokens / 8
    row, step = np.polyfit(counts, np.subtract(seconds, [decoder.step(count, context) for count in counts]), 1)
    traffic = context * 2 * shape.keys * shape.layers * size + HEAD_BYTES * shape.vocabulary
    reading = traffic / (max(1e-9, float(row)) * hardware.bandwidth)
    return {"decode": 0.0, "decode_layer": max(0.0, float(step)) / shape.layers, "decode_row": 0.0, "reading": reading}


def as_yaml(base: dict[str, Any], measured: dict[str, float], device: str) -> str:
    about = f"measured by scripts/bench/calibrate.py, {date.today()}, torch {torch.__version__}"
    name = torch.cuda.get_device_name() if device == "cuda" else "one core of a CPU for each worker"
    lines = [f"# {name[0].upper()}{name[1:]}; written by scripts/bench/calibrate.py.", f"device: {device}"]
    for key, rate in base.items():
        if key == "device":
            continue
        value, source = (measured[key], about) if key in measured else (float(rate["value"]), rate["source"])
        lines.append(f"{key}: {{value: {value:.4g}, unit: {rate['unit']}, source: '{source}'}}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
