"""The longest row that fits: predicted by the memory model (trainer/planner/memory_model.py), and measured on this device.

    python scripts/bench/context.py predict                                        # tables, in tokens
    python scripts/bench/context.py measure --shape 7b --tokens 16384 32768 65536  # one GPU; stops when memory runs out
    python scripts/bench/context.py measure --shape 0.5b --card 24 --tokens 32768  # with the memory of a 24 GB GPU
    python scripts/bench/context.py draw --shape 7b --card 80 --gpus 8 --output docs/context.svg

Weights are random, nothing is downloaded: a shape's name is the size of a Qwen2.5 model. GB is 10^9 bytes.
"""

import argparse
import json
import tempfile
import time
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn

from scripts.bench.shapes import SHAPES, Likelihood, LoneEngine, random_rows
from trainer.planner.memory_model import Setting, Shape, longest, scoring, training
from workers.engine.fsdp.fsdp_engine import FSDPEngine
from workers.engine.hf.hf_model import DTYPES
from workers.engine.out_of_memory import OutOfMemory, is_out_of_memory

MODELS = ("0.5b", "1.5b", "7b", "32b", "72b")
CARDS = {24: 23.6, 40: 39.4, 80: 79.1, 141: 139.8}  # nominal GB of a GPU: GiB that torch sees
OUTSIDE = 0.7e9  # bytes: the driver's context, and libraries' workspaces
SLACK = 0.03  # of the rest: what the allocator cannot use, with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("predict", "measure", "draw"))
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--model_dtype", choices=DTYPES, default="float32")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048], help="rows to measure, the shortest first")
    parser.add_argument("--card", type=int, choices=CARDS, default=141, help="GB; a larger device is limited to it")
    parser.add_argument("--gpus", type=int, default=1, help="of the drawing")
    parser.add_argument("--micro_batches", type=int, default=1, help="of a step, each of one such row")
    parser.add_argument("--offload", action="store_true", help="layer inputs on the host")
    parser.add_argument("--pieces", type=int, default=1, help="of the tokens that an MLP takes in turn")
    parser.add_argument("--optimizer_offload", action="store_true")
    parser.add_argument("--forward", action="store_true", help="log-probs alone")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.what == "predict":
        print(tables())
    elif args.what == "draw":
        draw(args)
    else:
        measure(args)


def usable(card: int) -> float:
    """Bytes of tensors that fit on a GPU of nominally ``card`` GB."""
    return (CARDS[card] * 2**30 - OUTSIDE) * (1 - SLACK)


KINDS = {
    "all weights": (Setting(), training),
    "all weights, both options": (Setting(offload=True, pieces=8), training),
    "frozen base": (Setting(kept=2, trained=False), training),
    "frozen base, both options": (Setting(kept=2, trained=False, offload=True, pieces=8), training),
    "log-probs alone": (Setting(kept=2, trained=False), scoring),
}


def tables() -> str:
    """Markdown table; each cell: on one GPU, on 8, on 8 with Ulysses."""
    lines = [["model", "what", *(f"{card} GB" for card in CARDS)], ["---"] * (2 + len(CARDS))]
    for name in MODELS:
        shape = Shape.of(SHAPES[name])
        for kind, (setting, phase) in KINDS.items():
            cuts = [replace(setting, gpus=gpus, sp=sp) for gpus, sp in ((1, 1), (8, 1), (8, 8))]
            cells = [" / ".join(rounded(longest(phase, shape, cut, usable(card))) for cut in cuts) for card in CARDS]
            lines.append([name, kind, *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def rounded(tokens: int) -> str:
    """Tokens rounded down to thousands or millions; `-` below a thousand."""
    if tokens >= 1_000_000:
        return f"{tokens // 100_000 / 10}M"
    return f"{tokens // 1000}k" if tokens >= 1000 else "-"


def measure(args: argparse.Namespace) -> None:
    """Print a line of JSON per row length, until one does not fit: a process that ran out of memory is not used again."""
    if args.device == "cuda":
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, (CARDS[args.card] * 2**30 - OUTSIDE) / total))
    shape = Shape.of(SHAPES[args.shape])
    setting = Setting(
        kept=DTYPES[args.model_dtype].itemsize,
        compute=DTYPES[args.dtype].itemsize,
        trained=not args.forward,
        optimizer_offload=args.optimizer_offload,
        several=args.micro_batches > 1,
        offload=args.offload,
        pieces=args.pieces,
        gqa="enable_gqa" in signature(varlen_attn).parameters,
    )
    phase = scoring if args.forward else training
    with tempfile.TemporaryDirectory() as folder:
        engine = LoneEngine(
            shape=args.shape, device=args.device, model_dtype=args.model_dtype, dtype=args.dtype, trained=not args.forward,
            recompute=True, offload=args.offload, pieces=args.pieces, optimizer_offload=args.optimizer_offload,
        ).build(Path(folder))  # fmt: skip
        step(engine, args, 512)
        print(json.dumps({"settings": {name: str(value) for name, value in vars(args).items()}}), flush=True)
        for tokens in args.tokens:
            parts = phase(shape, setting, tokens)
            result = {"tokens": tokens, "predicted_gb": round(sum(parts.values()) / 1e9, 2)}
            try:
                result |= step(engine, args, tokens)
            except (OutOfMemory, RuntimeError) as error:
                if not isinstance(error, OutOfMemory) and not is_out_of_memory(error):
                    raise
                print(json.dumps(result | {"fits": False}), flush=True)
                return
            print(json.dumps(result), flush=True)


def step(engine: FSDPEngine, args: argparse.Namespace, tokens: int) -> dict[str, Any]:
    """One step on rows of ``tokens`` tokens. Peaks are the allocator's: bytes of tensors, and bytes reserved on the device."""
    rows = args.micro_batches
    batch = random_rows(args.shape, [tokens] * rows)
    plan = tuple((row,) for row in range(rows))
    if args.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    if args.forward:
        engine.forward(batch, plan, {"log_probs"})
    else:
        metrics = engine.train_step(batch, plan, Likelihood())
        assert "lr" in metrics, "the update was skipped"
    if args.device != "cuda":
        return {"seconds": round(time.perf_counter() - start, 2)}
    torch.cuda.synchronize()
    return {
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2),
        "reserved_gb": round(torch.cuda.max_memory_reserved() / 1e9, 2),
        "seconds": round(time.perf_counter() - start, 2),
    }


def draw(args: argparse.Namespace) -> None:
    """Memory by part against the row's length, up to the longest that fits."""
    import matplotlib.pyplot as plt

    shape = Shape.of(SHAPES[args.shape])
    figure, panes = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True)
    kinds = {
        "all weights trained, float32": Setting(gpus=args.gpus),
        "frozen base, bfloat16": Setting(gpus=args.gpus, kept=2, trained=False),
    }
    for pane, (title, setting) in zip(panes, kinds.items(), strict=True):
        most = longest(training, shape, setting, usable(args.card))
        rows = [most * i / 50 for i in range(51)]
        parts = [training(shape, setting, row) for row in rows]
        names = list(parts[0])
        pane.stackplot([row / 1000 for row in rows], *([part[name] / 1e9 for part in parts] for name in names), labels=names)
        pane.axhline(CARDS[args.card] * 2**30 / 1e9, color="black", linewidth=1)
        pane.set(title=title, xlabel="tokens of a row, thousands", xlim=(0, most / 1000))
    panes[0].set_ylabel("GB on a GPU")
    panes[0].legend(loc="upper left", fontsize=7, reverse=True)
    figure.suptitle(f"{args.shape}, {args.gpus} x {args.card} GB")
    figure.tight_layout()
    figure.savefig(args.output, metadata={"Date": None} if args.output.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
