"""Log-probs and updates of one worker's FSDP engine: tokens per second, and relative to bare matrix products in the same run.

    python scripts/bench/train.py                                      # 84M and 3.39M parameters, float32 and bfloat16, 4k tokens
    python scripts/bench/train.py --shapes 7b --dtypes bfloat16 --model_dtype bfloat16 --device cuda --tokens 8192 --recompute
    python scripts/bench/train.py --shapes 84m --dtypes float32 --profile    # and where the time goes
    python scripts/bench/train.py --shapes 0.5b --dtypes bfloat16 --device cuda --tokens 16384 --rounds 20 --entropy sampled
    python scripts/bench/train.py --shapes 3m --dtypes float32 --groups 17x60 128x64    # shared prompts
    python scripts/bench/train.py --shapes 3m --dtypes float32 --turns 64x32x16    # shared prefixes of conversations
    python scripts/bench/train.py --quick                              # a smoke version, seconds

Rows are ragged, packed, and all their tokens count. gemm: matrix products of the model's own shapes, each of a whole micro-batch,
weighted by how often a forward (and its backward) has them; products, forward and update take turns. of gemm: model FLOPs per
second over that rate; recomputation is no model FLOP. On the CPU, which may be shared, CPU seconds of the only thread count; on
CUDA wall seconds. forward: log-probs without gradient. f+b: forward and backward of a step; update: with the optimizer.
--entropy: one more part, the same update that also measures the policy's entropy (sampled: over a sixteenth of the tokens, the
default of a run; full: over all of them, actor.calculate_entropy). Its line ends with how much longer it takes, the median of the
rounds' ratios. waste: fraction of tokens that went through the model and are padding; padded: the fraction if rows were padded to
the longest. --groups, --turns: instead, rows that share prefixes, of the first shape and dtype, relative to complete rows.
--groups: groups of 8 responses to a prompt. --turns: 8 conversations of 4 turns that begin with one prompt; each turn is a row
with all before it. prompts: only the prompt is computed once; tree: every token. A table goes to stderr, JSON to stdout.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from scripts.bench.shapes import SHAPES, Likelihood, LikelihoodAndEntropy, LoneEngine, random_rows
from trainer.algorithms.losses.actor_loss import entropy_mask
from trainer.tracking.metrics import peak_flops
from workers.batch import Batch
from workers.engine import logprob
from workers.engine.fsdp.fsdp_engine import FSDPEngine
from workers.engine.hf.hf_model import DTYPES
from workers.prefixes import PREFIX_ENDS, chains_by_group, prefix_ends

PROMPT = 17  # tokens of each row before its response
GROUPS, N = 7, 8  # of --groups: prompts, and responses of each; of --turns: one prompt, and conversations
TURNS = 4
COLUMNS = ("case", "part", "ms", "CPU ms", "tokens/s", "GFLOP/s", "of gemm", "of peak", "waste", "padded")
Seconds = tuple[float, float]
"""Wall, and CPU of this process."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=SHAPES, nargs="+", default=["84m", "3m"], help="(default: %(default)s)")
    parser.add_argument("--dtypes", choices=DTYPES, nargs="+", default=["float32", "bfloat16"], help="of the arithmetic")
    parser.add_argument("--model_dtype", choices=DTYPES, default="float32", help="of parameters and moments")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--tokens", type=int, default=4096, help="of a micro-batch (default: %(default)s)")
    parser.add_argument("--micro_batches", type=int, default=1, help="of an update (default: %(default)s)")
    parser.add_argument(
        "--longest", type=int, default=256, help="longest response; the mean is a quarter of it (default: %(default)s)"
    )
    parser.add_argument("--recompute", action="store_true", help="recompute layers in the backward")
    parser.add_argument("--compile", action="store_true", help="fsdp_config.use_torch_compile: layers and language head")
    parser.add_argument("--chunk", type=int, default=None, help="of positions, in the language head (default: the engine's)")
    parser.add_argument("--entropy", choices=("sampled", "full"), help="also measure an update with the entropy")
    parser.add_argument("--groups", nargs="+", metavar="PROMPTxRESPONSE", help="measure shared prompts of these lengths instead")
    parser.add_argument(
        "--turns",
        nargs="+",
        metavar="PROMPTxSAMPLEDxOBSERVED",
        help="measure conversations of such turns that share prefixes instead",
    )
    parser.add_argument("--rounds", type=int, default=5, help="after one that warms up (default: %(default)s)")
    parser.add_argument("--profile", action="store_true", help="one more forward and update, operation by operation")
    parser.add_argument("--quick", action="store_true", help="3.39M parameters, float32, 512 tokens, two rounds")
    args = parser.parse_args()
    if args.quick:
        args.shapes, args.dtypes, args.tokens, args.rounds = ["3m"], ["float32"], 512, 2
    if args.chunk is not None:
        logprob.chunk_size = logprob.backward_chunk_size = lambda *sizes, fused=False: args.chunk
    if args.device == "cpu":
        torch.set_num_threads(1)
    cases = measure_groups(args) if args.groups or args.turns else measure_cases(args)
    device = torch.cuda.get_device_name() if args.device == "cuda" else f"cpu, {torch.get_num_threads()} thread"
    settings = vars(args) | {"torch": torch.__version__, "device": device}
    print(json.dumps({"settings": settings, "cases": cases, "load": os.getloadavg()}, indent=1))


def measure_cases(args: argparse.Namespace) -> dict[str, Any]:
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS), file=sys.stderr)
    cases = {}
    for shape in args.shapes:
        for dtype in args.dtypes:
            name = f"{shape} {dtype}"
            cases[name] = measure(args, shape, dtype)
            print(table(name, cases[name]), file=sys.stderr, flush=True)
    return cases


def ragged(tokens: int, longest: int) -> list[int]:
    """Row lengths with sum ``tokens``: a prompt, and a response of geometric length (mean longest / 4, at most longest)."""
    draw = np.random.default_rng(0)
    rows: list[int] = []
    while (left := tokens - sum(rows)) > 0:
        rows.append(min(left, PROMPT + min(int(draw.geometric(4 / longest)), longest)))
    return rows


class Products:
    """y = x W' of every weight matrix of a model, and the two products of its backward, for args.tokens tokens at once."""

    def __init__(self, args: argparse.Namespace, shape: str, dtype: str) -> None:
        sizes = SHAPES[shape]
        hidden, middle = sizes["hidden_size"], sizes["intermediate_size"]
        keys = hidden // sizes["num_attention_heads"] * sizes["num_key_value_heads"]
        layer = [(hidden, hidden)] * 2 + [(hidden, keys)] * 2 + [(hidden, middle)] * 2 + [(middle, hidden)]
        self.counts = Counter(layer * sizes["num_hidden_layers"] + [(hidden, sizes["vocab_size"])])
        self.tokens, self.device, self.options = args.tokens, args.device, {"device": args.device, "dtype": DTYPES[dtype]}
        self.flops = sum(2.0 * self.tokens * n * m * count for (n, m), count in self.counts.items())
        """FLOPs of the forward; the backward has twice as many."""

    def seconds(self) -> tuple[float, float]:
        """Seconds of all forward products, and of all products."""
        forward = backward = 0.0
        for (n, m), count in self.counts.items():
            x, dy = (torch.randn(self.tokens, width, **self.options) for width in (n, m))
            weight = torch.randn(m, n, **self.options)
            forward += count * self._time(x, weight.T)
            backward += count * (self._time(dy, weight) + self._time(dy.T, x))
        return forward, forward + backward

    def _time(self, left: Tensor, right: Tensor) -> float:
        out = torch.zeros(len(left), right.shape[1], **self.options)
        repeats = 1 + int((1e12 if self.device == "cuda" else 4e9) / (2 * left.numel() * right.shape[1]))

        def work() -> None:
            for _ in range(repeats):
                torch.mm(left, right, out=out)

        return counted(timed(self.device, work), self.device) / repeats


def counted(seconds: Seconds, device: str) -> float:
    """Seconds that rates are based on: wall on CUDA, CPU otherwise."""
    wall, cpu = seconds
    return wall if device == "cuda" else cpu


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(device: str, work: Callable[[], Any]) -> Seconds:
    synchronize(device)
    start, used = time.perf_counter(), time.process_time()
    work()
    synchronize(device)
    return time.perf_counter() - start, time.process_time() - used


def measure(args: argparse.Namespace, shape: str, dtype: str) -> dict[str, Any]:
    """Medians over the rounds; ratios are taken within each round."""
    lengths = ragged(args.tokens, args.longest)
    rows = random_rows(shape, lengths * args.micro_batches)
    rows = rows.with_tokens(entropy_mask=entropy_mask(rows.tokens["response_mask"]))
    plan = tuple(tuple(range(i * len(lengths), (i + 1) * len(lengths))) for i in range(args.micro_batches))
    products, total = Products(args, shape, dtype), rows.total_tokens
    with tempfile.TemporaryDirectory() as folder:
        engine = LoneEngine(
            shape=shape, device=args.device, model_dtype=args.model_dtype, dtype=dtype, recompute=args.recompute,
            compiled=args.compile,
        ).build(Path(folder))  # fmt: skip
        seen = count_tokens(engine)
        parts: dict[str, list[Seconds]] = {"forward": [], "f+b": [], "update": []}
        measured = LikelihoodAndEntropy(args.entropy) if args.entropy else None
        if measured is not None:
            parts["with entropy"] = []
        times_accumulate(engine, args.device, parts["f+b"])
        gemm = []
        for _ in range(args.rounds + 1):
            gemm.append(products.seconds())
            parts["forward"].append(timed(args.device, lambda: engine.forward(rows, plan, {"log_probs"})))
            parts["update"].append(timed(args.device, lambda: engine.train_step(rows, plan, Likelihood())))
            if measured is not None:
                parts["with entropy"].append(timed(args.device, lambda: engine.train_step(rows, plan, measured)))
                parts["f+b"].pop()
        waste = 1 - ((3 if args.entropy else 2) * (args.rounds + 1)) * total / sum(seen)
        if args.profile:
            with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (args.device == "cuda")]) as found:
                engine.forward(rows, plan, {"log_probs"})
                engine.train_step(rows, plan, Likelihood())
                synchronize(args.device)
            order = f"self_{args.device}_time_total"
            print(found.key_averages().table(sort_by=order, row_limit=30, max_name_column_width=60), file=sys.stderr)
        flops = {name: engine.flops(rows.lengths.tolist(), backward=name != "forward") for name in parts}
        dist.destroy_process_group()
    peak = peak_flops(args.device) if args.device == "cuda" and dtype == "bfloat16" else None
    rates = {"forward": [products.flops / of[0] for of in gemm[1:]]}
    rates["f+b"] = rates["update"] = rates["with entropy"] = [3 * products.flops / of[1] for of in gemm[1:]]
    found_parts = {}
    for name, times in parts.items():
        timed_rounds = times[1 : args.rounds + 1]  # not the first, and not the profile's
        ratios = [flops[name] / counted(of, args.device) / rate for of, rate in zip(timed_rounds, rates[name], strict=True)]
        seconds, cpu = (statistics.median(column) for column in zip(*timed_rounds, strict=True))
        median = counted((seconds, cpu), args.device)
        speed = flops[name] / median
        found_parts[name] = {
            "seconds": seconds,
            "cpu_seconds": cpu,
            "tokens_per_second": total / median,
            "flops_per_second": speed,
            "gemm_flops_per_second": statistics.median(rates[name]),
            "of_gemm": statistics.median(ratios),
            "of_gemm_all": ratios,
            "of_peak": None if peak is None else speed / peak,
        }
    if args.entropy is not None:
        pairs = zip(parts["with entropy"][1 : args.rounds + 1], parts["update"][1 : args.rounds + 1], strict=True)
        ratios = [counted(one, args.device) / counted(other, args.device) for one, other in pairs]
        found_parts["with entropy"]["over_update"] = statistics.median(ratios) - 1
    return {
        "parameters": sum(param.numel() for param in engine._params.values()),
        "tokens": total,
        "rows": len(rows),
        "padding_waste": waste,
        "padded_waste": 1 - total / (len(rows) * max(lengths)),
        "gigabytes": torch.cuda.max_memory_allocated() / 1e9 if args.device == "cuda" else None,
        "parts": found_parts,
    }


def measure_groups(args: argparse.Namespace) -> dict[str, Any]:
    """Log-probs and gradients of rows whose prefixes are computed once, relative to the same rows in full.

    All are one micro-batch and alternate; medians of the ratios of the rounds.
    """
    print("| rows | tokens | computed | log-probs, ms | x whole | f+b, ms | x whole |\n" + "|---" * 7 + "|", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        engine = LoneEngine(
            shape=args.shapes[0], device=args.device, model_dtype=args.model_dtype, dtype=args.dtypes[0],
            recompute=args.recompute, compiled=args.compile,
        ).build(Path(folder))  # fmt: skip
        cases: dict[str, Any] = {}
        for lengths in args.groups or ():
            cases |= measure_shared(engine, args, lengths, group_sides(args.shapes[0], *map(int, lengths.split("x"))))
        for lengths in args.turns or ():
            cases |= measure_shared(engine, args, lengths, turn_sides(args.shapes[0], *map(int, lengths.split("x"))))
        dist.destroy_process_group()
    return cases


def group_sides(shape: str, prompt: int, response: int) -> dict[str, Batch]:
    """Groups of responses: in full, and with shared prompts."""
    whole = random_rows(shape, [prompt + response] * GROUPS * N)
    ids = whole.tokens["input_ids"].view(GROUPS, N, -1).clone()
    ids[:, :, :prompt] = ids[:, :1, :prompt]
    whole = whole.with_tokens(input_ids=ids.flatten(), response_mask=(whole.positions() >= prompt).long())
    return {"whole": whole, "": whole.with_rows(prompt_length=torch.full((len(whole),), prompt))}


def turn_sides(shape: str, prompt: int, sampled: int, observed: int) -> dict[str, Batch]:
    """N conversations of TURNS turns, each turn a row with all before it: in full, with shared prompts, with shared prefixes."""
    turn, longest = sampled + observed, prompt + TURNS * (sampled + observed) - observed
    ids = random_rows(shape, [longest] * N).tokens["input_ids"].view(N, longest).clone()
    ids[:, :prompt] = ids[:1, :prompt]
    lengths = torch.tensor([longest - turn * (TURNS - 1 - part) for part in range(TURNS)] * N)
    rows = [ids[i // TURNS, :length] for i, length in enumerate(lengths.tolist())]
    batch = Batch(lengths, {"input_ids": torch.cat(rows)}, meta={"temperature": 1.0})
    mask = (batch.positions() >= torch.repeat_interleave(lengths - sampled, lengths)).long()
    whole = batch.with_tokens(response_mask=mask, loss_weight=mask / mask.sum())
    prompts = whole.with_rows(prompt_length=torch.full((len(whole),), prompt))
    grouped = prompts.with_rows(group=torch.zeros_like(lengths), part=torch.arange(TURNS).repeat(N))
    return {"whole": whole, "prompts": prompts, "tree": whole.with_rows(**{PREFIX_ENDS: prefix_ends(chains_by_group(grouped))})}


def measure_shared(engine: FSDPEngine, args: argparse.Namespace, lengths: str, sides: dict[str, Batch]) -> dict[str, Any]:
    """Cases of all ``sides`` but whole, by name: lengths and the side."""
    whole, plan, seen = sides["whole"], (tuple(range(len(sides["whole"]))),), count_tokens(engine)
    found: dict[str, dict[str, list[float]]] = {"log-probs": {}, "f+b": {}}
    computed = {}

    def train(batch: Batch) -> None:
        engine.accumulate(batch, plan, Likelihood())
        engine.move(grads="cpu")

    for _ in range(args.rounds + 1):
        for side, batch in sides.items():
            forward = timed(args.device, lambda rows=batch: engine.forward(rows, plan, {"log_probs"}))  # type: ignore[misc]
            both = timed(args.device, lambda rows=batch: train(rows))  # type: ignore[misc]
            found["log-probs"].setdefault(side, []).append(counted(forward, args.device))
            found["f+b"].setdefault(side, []).append(counted(both, args.device))
            computed[side] = seen[-1]
    cases: dict[str, Any] = {}
    for side in sides.keys() - {"whole"}:
        case = cases[f"{lengths} {side}".strip()] = {"tokens": whole.total_tokens, "computed": computed[side]}
        for part, times in found.items():
            ratios = [one / other for one, other in zip(times[side][1:], times["whole"][1:], strict=True)]
            case[part] = {"seconds": statistics.median(times[side][1:]), "of_whole": statistics.median(ratios), "all": ratios}
    for name, case in sorted(cases.items()):
        cells = [f"{case[part]['seconds'] * 1e3:.1f} | {case[part]['of_whole']:.2f}" for part in found]
        print(f"| {name} | {whole.total_tokens} | {case['computed']} | " + " | ".join(cells) + " |", file=sys.stderr, flush=True)
    return cases


def count_tokens(engine: FSDPEngine) -> list[int]:
    """List to which each forward appends the number of tokens that pass the embedding."""
    seen: list[int] = []
    engine._model.hf.get_input_embeddings().register_forward_hook(lambda module, inputs, out: seen.append(inputs[0].numel()))
    return seen


def times_accumulate(engine: FSDPEngine, device: str, times: list[Seconds]) -> None:
    """Make the engine append the seconds of each accumulate (forward and backward) to ``times``."""
    accumulate = engine.accumulate

    def run(*args: Any) -> Any:
        found = []
        times.append(timed(device, lambda: found.append(accumulate(*args))))
        return found[0]

    engine.accumulate = run


def table(name: str, case: dict[str, Any]) -> str:
    lines = []
    for part, found in case["parts"].items():
        cells = (
            name, part, f"{found['seconds'] * 1e3:.1f}", f"{found['cpu_seconds'] * 1e3:.1f}", f"{found['tokens_per_second']:.0f}",
            f"{found['flops_per_second'] / 1e9:.1f}", f"{found['of_gemm']:.1%}",
            "" if found["of_peak"] is None else f"{found['of_peak']:.1%}",
            f"{case['padding_waste']:.1%}", f"{case['padded_waste']:.1%}",
        )  # fmt: skip
        more = f" {found['over_update']:+.2%} of the update" if "over_update" in found else ""
        lines.append("| " + " | ".join(cells) + " |" + more)
    return "\n".join(lines)


if __name__ == "__main__":
    main()
