"""Generation speed of the rollout engines and of transformers `generate`, in one run, as JSON.

    python scripts/bench/rollout.py                                  # all workloads and engines, 5 alternating rounds
    python scripts/bench/rollout.py --quick                          # a smoke version, seconds
    python scripts/bench/rollout.py --workload ragged_84m --rounds 3 --hf_batch_sizes   # without transformers' generate

All generate exactly the same number of useful tokens: each request's length is fixed in advance, and nothing ends it earlier.
Prompts change each round, so that prefix caches do not help. generate is measured under favourable conditions: the best of
several batch sizes, no scores returned. It cannot sort requests by length. The engines also return log-probs. Seconds are CPU
seconds of this process, which has one thread, and of those that an engine has started; wall seconds are reported too. An engine
that is not installed, or does not support the model, is reported as missing.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging

from configs.compose import compose
from configs.schema.generation import GenerationConfig
from scripts.bench.shapes import SHAPES
from workers.controller.group import WorkerInfo
from workers.controller.ports import free_port
from workers.roles.rollout_engines import ENGINES, check_installed, make_rollout
from workers.roles.worker import Worker
from workers.rollout.base import Request, Rollout, RolloutSpec, Sampling

WORKLOADS = ("ragged", "even", "quickstart", "ragged_84m", "even_84m")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, action="append", help="(default: all but the 84M ones)")
    parser.add_argument("--engines", choices=ENGINES, nargs="+", default=list(ENGINES), help="(default: %(default)s)")
    parser.add_argument("--reference", default="embedded", help="engine that ratios are relative to (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=32, help="different prompts (default: %(default)s)")
    parser.add_argument("--n", type=int, default=8, help="responses per prompt (default: %(default)s)")
    parser.add_argument("--max_tokens", type=int, default=256, help="longest response of ragged (default: %(default)s)")
    parser.add_argument("--max_num_seqs", type=int, default=256, help="an engine's slots (default: %(default)s)")
    parser.add_argument("--hf_batch_sizes", type=int, nargs="*", default=[256, 128, 64], help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="4 prompts x 4, at most 16 tokens, one round")
    args = parser.parse_args()
    if args.quick:
        args.prompts, args.n, args.max_tokens, args.hf_batch_sizes, args.rounds = 4, 4, 16, [16], 1
    os.environ["OMP_NUM_THREADS"] = "1"  # of processes that engines start
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    args.workload = args.workload or ["ragged", "even", "quickstart"]
    results = {name: measure(name, args) for name in args.workload}
    settings = vars(args) | {"torch": torch.__version__, "threads": torch.get_num_threads(), "dtype": "float32"}
    print(json.dumps({"settings": settings, "workloads": results, "load": os.getloadavg()}, indent=1))


def measure(name: str, args: argparse.Namespace) -> dict[str, object]:
    sizes, prompt_length, lengths = workload(name, args)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**sizes)).eval()
    contenders: dict[str, Callable[[list[Request]], int]] = {}
    with ExitStack() as stack:
        found, missing = start_engines(model, args, prompt_length + max(lengths), stack)
        contenders |= {engine: partial(run_engine, rollout) for engine, rollout in found.items()}
        contenders |= {f"generate, batch {size}": partial(run_generate, model, batch_size=size) for size in args.hf_batch_sizes}
        shape = (args.prompts, prompt_length)
        rounds = [requests(lengths, shape, args.n, sizes["vocab_size"], number) for number in range(args.rounds + 1)]
        cpu, wall = race(contenders, rounds)
    wanted = sum(lengths)
    medians = {contender: statistics.median(times) for contender, times in cpu.items()}
    slow = [contender for contender in contenders if contender.startswith("generate")]
    return {
        "model": sizes | {"parameters": sum(parameter.numel() for parameter in model.parameters())},
        "requests": len(lengths),
        "response_tokens": wanted,
        "longest": max(lengths),
        "cpu_seconds": cpu,
        "wall_seconds": wall,
        "tokens_per_cpu_second": {contender: wanted / median for contender, median in medians.items()},
        "tokens_per_second": {contender: wanted / statistics.median(times) for contender, times in wall.items()},
        "reference": args.reference,
        "cpu_ratios": ratios(cpu, args.reference),
        "wall_ratios": ratios(wall, args.reference),
        "best_generate": min(slow, key=medians.__getitem__, default=None),
        "missing": missing,
    }


def race(
    contenders: dict[str, Callable[[list[Request]], int]], rounds: Sequence[list[Request]]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """CPU and wall seconds of each contender in each round but the first, which warms up."""
    cpu: dict[str, list[float]] = {contender: [] for contender in contenders}
    wall: dict[str, list[float]] = {contender: [] for contender in contenders}
    for asked in rounds:
        wanted = sum(request.sampling.max_tokens for request in asked)
        for contender, run in contenders.items():
            started, used = time.perf_counter(), cpu_seconds()
            made = run(asked)
            cpu[contender].append(cpu_seconds() - used)
            wall[contender].append(time.perf_counter() - started)
            assert made == wanted, f"{contender} made {made} useful tokens, not {wanted}"
    return {name: times[1:] for name, times in cpu.items()}, {name: times[1:] for name, times in wall.items()}


def cpu_seconds() -> float:
    """CPU seconds of this process and its children."""
    children = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return time.process_time() + sum(times.user + times.system for times in children)


def ratios(seconds: dict[str, list[float]], reference: str) -> dict[str, float]:
    """Speed of each contender relative to the reference: medians over the ratios of each round."""
    if reference not in seconds:
        return {}
    pairs = {name: zip(seconds[reference], times, strict=True) for name, times in seconds.items()}
    return {name: statistics.median(base / own for base, own in of_rounds) for name, of_rounds in pairs.items()}


def workload(name: str, args: argparse.Namespace) -> tuple[dict[str, Any], int, list[int]]:
    """The model's sizes, tokens of a prompt, and tokens of each response.

    ragged: geometric lengths with mean max_tokens / 4, truncated at max_tokens. even: all lengths are that mean. quickstart: the
    quick start's model and lengths.
    """
    rng = np.random.default_rng(0)
    count, mean = args.prompts * args.n, args.max_tokens / 4
    if name == "quickstart":
        return SHAPES["quickstart"], 7, [7] * count
    sizes = SHAPES["84m" if name.endswith("_84m") else "3m"]
    if name.startswith("even"):
        return sizes, 17, [int(mean)] * count
    return sizes, 17, np.minimum(rng.geometric(1 / mean, count), args.max_tokens).tolist()


def requests(lengths: Sequence[int], shape: tuple[int, int], n: int, vocabulary: int, number: int) -> list[Request]:
    """Requests of a round: new prompts, the same lengths. shape: of the prompts; ``n`` responses each."""
    prompts = np.random.default_rng(number + 1).integers(0, vocabulary, shape).repeat(n, axis=0)
    return [
        Request(i, tuple(prompt), Sampling(1.0, -1, 1.0, length, stop_token_ids=(), ignore_eos=True), seed=i)
        for i, (prompt, length) in enumerate(zip(prompts.tolist(), lengths, strict=True))
    ]


def start_engines(
    model: PreTrainedModel, args: argparse.Namespace, longest: int, stack: ExitStack
) -> tuple[dict[str, Rollout], dict[str, str]]:
    """The available engines, with the model's weights; and for each of the others, why it is missing."""
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    model.save_pretrained(Path(folder))
    overrides = [f"actor_rollout_ref.model.path={folder}", "actor_rollout_ref.rollout.dtype=float32", "trainer.device=cpu"]
    overrides += [
        f"actor_rollout_ref.rollout.{key}" for key in (f"max_num_seqs={args.max_num_seqs}", "tensor_model_parallel_size=1")
    ]
    models = compose("generation", GenerationConfig, overrides).actor_rollout_ref
    worker = stack.enter_context(closing(Worker(WorkerInfo(0, 1, 0, 0, "127.0.0.1", free_port()), "cpu", 1800.0)))
    found: dict[str, Rollout] = {}
    missing: dict[str, str] = {}
    for name in args.engines:
        try:
            check_installed(name)
            engine = make_rollout(RolloutSpec(models.model, replace(models.rollout, name=name), longest, "cpu"), worker.info)
        except ValueError as error:
            missing[name] = str(error)
            continue
        found[name] = stack.enter_context(closing(engine))
        weights = dict(model.named_parameters())
        if not engine.share_weights(weights, version=0):
            engine.load_weights(iter(weights.items()), version=0)
    return found, missing


def run_engine(engine: Rollout, asked: list[Request]) -> int:
    return sum(len(completion.token_ids) for completion in engine.generate(asked))


class Lengths(StoppingCriteria):
    """Stops each row at its own length; generate continues until all rows have stopped."""

    def __init__(self, prompt_length: int, lengths: list[int]) -> None:
        self.ends = torch.tensor(lengths) + prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: object) -> Tensor:
        return input_ids.shape[1] >= self.ends


def run_generate(model: Qwen2ForCausalLM, asked: list[Request], batch_size: int) -> int:
    made = 0
    for i in range(0, len(asked), batch_size):
        part = asked[i : i + batch_size]
        prompts = torch.tensor([request.prompt_ids for request in part])
        lengths = [request.sampling.max_tokens for request in part]
        output: Any = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=max(lengths),
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([Lengths(prompts.shape[1], lengths)]),
        )
        assert output.shape[1] == prompts.shape[1] + max(lengths)
        made += sum(lengths)
    return made


if __name__ == "__main__":
    main()
