"""Tokens per second of vLLM beside the trainer, and alone, in turns, on a model with random weights, as JSON. One GPU.

    python scripts/bench/rollout_gpu_speed.py ours --shape 7b actor_rollout_ref.rollout.gpu_memory_utilization=0.25

All engines are started first, and stay awake; then each answers the same requests once, and again, and so on. Alone: vLLM's LLM
of the same arguments, as it comes (in processes of its own, with the model runner that vLLM chooses), and with our choices (in
one process, with our model runner). Further arguments are overrides of the configuration.
"""

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from scripts.bench.worker import Bench, command_line, make_requests, rollout_spec, run, timed
from workers.rollout.vllm.vllm_engine import ENVIRONMENT, engine_arguments, sampling_arguments

MARK = "tokens/s: "
MODES: dict[str, dict[str, Any]] = {"as ours": {}, "no seeds": {"seed": None}, "neither": {"seed": None, "logprobs": None}}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("what", choices=("ours", "alone"), help="ours: measures vLLM alone too; alone: that side of it")
    parser.add_argument("--requests", type=int, default=256, help="(default: %(default)s)")
    run(parser, {"ours": speed, "alone": serve})


def speed(args: argparse.Namespace) -> dict[str, Any]:
    """Medians over the rounds, and of the ratios within each; the first round warms up."""
    bench = Bench(args, trained=False)
    requests = make_requests(args, args.requests, ragged=False, temperature=1.0, max_tokens=args.max_tokens)
    bench.worker.run("rollout", "sync_weights", 1)
    with ExitStack() as running:
        as_it_comes = running.enter_context(alone(args, {}))
        in_one = running.enter_context(alone(args, ENVIRONMENT))
        sides: dict[str, Callable[[], float]] = {
            "ours": lambda: rate(args, lambda: bench.generate(requests)),
            "LLM, a seed each, log-probs": lambda: as_it_comes("as ours"),
            "LLM, no seeds, log-probs": lambda: as_it_comes("no seeds"),
            "LLM, no seeds, no log-probs": lambda: as_it_comes("neither"),
            "LLM within one process, our runner, no seeds, log-probs": lambda: in_one("no seeds"),
        }
        found = [{name: side() for name, side in sides.items()} for _ in range(args.rounds + 1)][1:]
    return {
        "tokens/s": {name: spread([round[name] for round in found]) for name in sides},
        "ours beside": {name: spread([round["ours"] / round[name] for round in found]) for name in sides if name != "ours"},
    }


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def rate(args: argparse.Namespace, generate: Callable[[], Any]) -> float:
    return args.requests * args.max_tokens / timed(args.device, generate)


@contextmanager
def alone(args: argparse.Namespace, environment: dict[str, str]) -> Iterator[Callable[[str], float]]:
    """A process with vLLM in it; given a mode it answers once, and says how fast."""
    same = [f"--{name}={vars(args)[name]}" for name in ("shape", "dtype", "device", "requests", "prompt_tokens", "max_tokens",
                                                           "model")]  # fmt: skip
    command = [sys.executable, __file__, "alone", *same, *args.overrides]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=os.environ | environment, **pipes) as process:

        def answer(mode: str) -> float:
            print(mode, file=process.stdin, flush=True)
            return next(float(line.removeprefix(MARK)) for line in process.stdout if line.startswith(MARK))

        next(line for line in process.stdout if line.startswith(MARK))  # it is there: the next one finds its memory taken
        yield answer
        process.stdin.close()
        process.stdout.read()


def serve(args: argparse.Namespace) -> dict[str, Any]:
    """vLLM alone, with the same arguments but for those that put it beside a trainer."""
    from vllm import LLM, SamplingParams

    arguments = engine_arguments(rollout_spec(args)) | {"load_format": "auto"}
    for ours in ("distributed_executor_backend", "enable_sleep_mode"):
        del arguments[ours]
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    engine = LLM(**arguments)
    print(f"{MARK}0", flush=True)
    requests = make_requests(args, args.requests, ragged=False, temperature=1.0, max_tokens=args.max_tokens)
    length = args.prompt_tokens + args.max_tokens
    prompts: Any = [{"prompt_token_ids": list(request.prompt_ids)} for request in requests]
    for line in sys.stdin:
        mode = MODES[line.strip()]
        params = [SamplingParams(**(sampling_arguments(request, length) | {"seed": request.seed} | mode)) for request in requests]

        def generate(params: list[Any] = params) -> Any:
            return engine.generate(prompts, params, use_tqdm=False)

        print(f"{MARK}{rate(args, generate)}", flush=True)
    return {}


if __name__ == "__main__":
    main()
