"""Tokens per second of vLLM beside the trainer, and alone, on a model with random weights, as JSON. One GPU.

    python scripts/bench/rollout_gpu_speed.py ours --shape 7b

Further arguments are overrides of the configuration.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from scripts.bench.rollout_gpu import Bench, command_line, make_requests, rollout_spec, run, timed
from workers.rollout.vllm import engine_arguments, sampling_arguments


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("what", choices=("ours", "alone"), help="ours: measures vLLM alone too; alone: that side of it")
    parser.add_argument("--requests", type=int, default=256, help="(default: %(default)s)")
    parser.add_argument("--unseeded", action="store_true", help="alone: no seed for each request")
    run(parser, {"ours": speed, "alone": alone})


def speed(args: argparse.Namespace) -> dict[str, Any]:
    """Ours, vLLM alone while ours sleeps, ours again. Alone: vLLM's LLM as it comes, and within one process as ours is."""
    bench = Bench(args, trained=False)
    requests = make_requests(args, args.requests, ragged=False, temperature=1.0, max_tokens=args.max_tokens)
    bench.host.run("rollout", "sync_weights", 1)
    first = rates(args, lambda: bench.generate(requests))
    bench.sleep()
    others = {
        "LLM, in one process": plain_run(args, {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}),
        "LLM": plain_run(args, {}),
        "LLM, no seeds": plain_run(args, {}, "--unseeded"),
    }
    bench.host.run("rollout", "sync_weights", 2)
    ours = first + rates(args, lambda: bench.generate(requests))
    median = statistics.median(ours)
    return {
        "tokens/s": {"ours": median} | {name: statistics.median(found) for name, found in others.items()},
        "ours beside": {name: median / statistics.median(found) for name, found in others.items()},
        "all": {"ours": ours} | others,
    }


def rates(args: argparse.Namespace, generate: Callable[[], Any]) -> list[float]:
    """Tokens per second of each repetition, after one that warms up."""
    tokens = args.requests * args.max_tokens
    return [tokens / timed(args.device, generate) for _ in range(args.rounds + 1)][1:]


def plain_run(args: argparse.Namespace, environment: dict[str, str], *more: str) -> list[float]:
    same = [f"--{name}={vars(args)[name]}" for name in ("shape", "dtype", "device", "rounds", "requests", "prompt_tokens",
                                                           "max_tokens", "model")]  # fmt: skip
    command = [sys.executable, __file__, "alone", *same, *more, *args.overrides]
    run = subprocess.run(command, env=os.environ | environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(run.stdout[run.stdout.index("{\n") :])["tokens/s"]


def alone(args: argparse.Namespace) -> dict[str, Any]:
    """vLLM alone, with the same arguments but for those that put it beside a trainer."""
    from vllm import LLM, SamplingParams

    arguments = engine_arguments(rollout_spec(args)) | {"load_format": "auto"}
    for ours in ("distributed_executor_backend", "enable_sleep_mode"):
        del arguments[ours]
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    engine = LLM(**arguments)
    requests = make_requests(args, args.requests, ragged=False, temperature=1.0, max_tokens=args.max_tokens)
    length = args.prompt_tokens + args.max_tokens
    seeds = [None if args.unseeded else request.seed for request in requests]
    params = [
        SamplingParams(**sampling_arguments(request, length), seed=seed) for request, seed in zip(requests, seeds, strict=True)
    ]
    prompts: Any = [{"prompt_token_ids": list(request.prompt_ids)} for request in requests]
    return {"tokens/s": rates(args, lambda: engine.generate(prompts, params, use_tqdm=False))}


if __name__ == "__main__":
    main()
