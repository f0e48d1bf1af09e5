"""What it saves to compute a group's prompt once: log-probs and gradients of groups, beside the same rows whole, in one run.

    python scripts/bench/shared_prompts.py                                                   # 3.39M parameters, one thread
    python scripts/bench/shared_prompts.py --shape 0.5b --device cuda --dtype bfloat16 --groups 4 --lengths 512x512 1024x256
    python scripts/bench/shared_prompts.py --quick                                           # a smoke version, seconds

--lengths: tokens of prompt x answer. Both sides are one micro-batch, and take turns; medians of the ratios of the rounds. CPU
seconds count on the CPU, wall seconds on CUDA. A table goes to stderr, JSON to stdout.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from scripts.bench.lone_engine import LoneEngine
from scripts.bench.shapes import SHAPES, Likelihood, random_rows
from scripts.bench.train import counted, timed
from workers.batch import Batch
from workers.engine.fsdp.fsdp_engine import FSDPEngine
from workers.engine.hf.hf_model import DTYPES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="3m")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the arithmetic")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--groups", type=int, default=7)
    parser.add_argument("--n", type=int, default=8, help="answers of a group")
    parser.add_argument("--lengths", nargs="+", default=["17x60", "7x7", "128x64"])
    parser.add_argument("--rounds", type=int, default=5, help="after one that warms up (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="two groups of 64 + 8 tokens, two rounds")
    args = parser.parse_args()
    if args.quick:
        args.groups, args.lengths, args.rounds = 2, ["64x8"], 2
    if args.device == "cpu":
        torch.set_num_threads(1)
    print(
        "| prompt x answer | tokens | computed | log-probs, ms | x whole | f+b, ms | x whole |\n" + "|---" * 7 + "|",
        file=sys.stderr,
    )
    with tempfile.TemporaryDirectory() as folder:
        engine = LoneEngine(
            shape=args.shape, device=args.device, model_dtype="float32", dtype=args.dtype, recompute=args.device == "cuda"
        ).build(Path(folder))  # fmt: skip
        cases = {lengths: measure(engine, args, *map(int, lengths.split("x"))) for lengths in args.lengths}
        dist.destroy_process_group()
    print(json.dumps({"settings": vars(args), "cases": cases, "load": os.getloadavg()}, indent=1))


def measure(engine: FSDPEngine, args: argparse.Namespace, prompt: int, answer: int) -> dict[str, Any]:
    whole = random_rows(args.shape, [prompt + answer] * args.groups * args.n)
    ids = whole.tokens["input_ids"].view(args.groups, args.n, -1).clone()
    ids[:, :, :prompt] = ids[:, :1, :prompt]
    mask = (whole.positions() >= prompt).long()
    whole = whole.with_tokens(input_ids=ids.flatten(), response_mask=mask)
    shared = whole.with_rows(prompt_length=torch.full((len(whole),), prompt))
    plan = (tuple(range(len(whole))),)
    found: dict[str, dict[str, list[float]]] = {"log-probs": {}, "f+b": {}}

    def train(batch: Batch) -> None:
        engine.accumulate(batch, plan, Likelihood())
        engine.move(grads="cpu")

    for _ in range(args.rounds + 1):
        for side, batch in (("shared", shared), ("whole", whole)):
            forward = timed(args.device, lambda rows=batch: engine.forward(rows, plan, {"log_probs"}))  # type: ignore[misc]
            both = timed(args.device, lambda rows=batch: train(rows))  # type: ignore[misc]
            found["log-probs"].setdefault(side, []).append(counted(forward, args.device))
            found["f+b"].setdefault(side, []).append(counted(both, args.device))
    tokens, computed = whole.total_tokens, args.groups * (prompt + args.n * answer)
    case: dict[str, Any] = {"tokens": tokens, "computed": computed}
    for part, sides in found.items():
        ratios = [ours / theirs for ours, theirs in zip(sides["shared"][1:], sides["whole"][1:], strict=True)]
        case[part] = {"seconds": statistics.median(sides["shared"][1:]), "of_whole": statistics.median(ratios), "all": ratios}
    cells = [f"{case[part]['seconds'] * 1e3:.1f} | {case[part]['of_whole']:.2f}" for part in found]
    print(f"| {prompt} x {answer} | {tokens} | {computed} | " + " | ".join(cells) + " |", file=sys.stderr, flush=True)
    return case


if __name__ == "__main__":
    main()
