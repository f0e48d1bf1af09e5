"""Generation speed of the embedded engine beside transformers `generate`, in one run, as JSON.

    python scripts/bench/rollout.py            # all workloads, medians of 5 alternating rounds
    python scripts/bench/rollout.py --quick    # a smoke version, seconds

Both make exactly the same number of useful tokens: each request's length is fixed beforehand, and nothing ends it earlier.
generate gets what helps it: its best of several batch sizes, no scores to return, requests whose lengths it cannot know in
their given order. The engine also returns log-probs. Seconds are CPU seconds of this process, which has one thread.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging

from configs.compose import compose
from configs.schema.ppo import PPOConfig
from workers.rollout.base import Request, Rollout, RolloutSpec, Sampling
from workers.rollout.embedded import EmbeddedRollout

SMALL: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "intermediate_size": 768,
    "vocab_size": 460,
    "tie_word_embeddings": False,
}
QUICKSTART: dict[str, Any] = {
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "intermediate_size": 288,
    "vocab_size": 64,
    "tie_word_embeddings": True,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=("ragged", "even", "quickstart"), action="append", help="(default: all)")
    parser.add_argument("--prompts", type=int, default=32, help="different prompts (default: %(default)s)")
    parser.add_argument("--n", type=int, default=8, help="answers a prompt (default: %(default)s)")
    parser.add_argument("--max_tokens", type=int, default=256, help="longest answer of ragged (default: %(default)s)")
    parser.add_argument("--max_num_seqs", type=int, default=256, help="the engine's slots (default: %(default)s)")
    parser.add_argument("--hf_batch_sizes", type=int, nargs="+", default=[256, 128, 64], help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="4 prompts x 4, at most 16 tokens, one round")
    args = parser.parse_args()
    if args.quick:
        args.prompts, args.n, args.max_tokens, args.hf_batch_sizes, args.rounds = 4, 4, 16, [16], 1
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    workloads = args.workload or ["ragged", "even", "quickstart"]
    results = {name: measure(name, args) for name in workloads}
    settings = vars(args) | {"torch": torch.__version__, "threads": torch.get_num_threads(), "dtype": "float32"}
    print(json.dumps({"settings": settings, "workloads": results, "load": os.getloadavg()}, indent=1))


def measure(name: str, args: argparse.Namespace) -> dict[str, object]:
    sizes, requests = workload(name, args)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(num_attention_heads=4, num_key_value_heads=2, **sizes)).eval()
    engine = embedded_engine(model, requests, args.max_num_seqs)
    contenders: dict[str, Callable[[], int]] = {"embedded": partial(run_embedded, engine, requests)}
    for size in args.hf_batch_sizes:
        contenders[f"generate, batch {size}"] = partial(run_generate, model, requests, size)
    seconds: dict[str, list[float]] = {contender: [] for contender in contenders}
    wanted = sum(request.sampling.max_tokens for request in requests)
    for _ in range(args.rounds + 1):
        for contender, run in contenders.items():
            start = time.process_time()
            made = run()
            seconds[contender].append(time.process_time() - start)
            assert made == wanted, f"{contender} made {made} useful tokens, not {wanted}"
    medians = {contender: statistics.median(times[1:]) for contender, times in seconds.items()}  # the first round warms up
    best = min((contender for contender in medians if contender != "embedded"), key=medians.__getitem__)
    return {
        "model": sizes | {"parameters": sum(parameter.numel() for parameter in model.parameters())},
        "requests": len(requests),
        "response_tokens": wanted,
        "longest": max(request.sampling.max_tokens for request in requests),
        "seconds": {contender: {"median": medians[contender], "all": times[1:]} for contender, times in seconds.items()},
        "tokens_per_s": {contender: wanted / median for contender, median in medians.items()},
        "best_generate": best,
        "ratio": medians[best] / medians["embedded"],
    }


def workload(name: str, args: argparse.Namespace) -> tuple[dict[str, Any], list[Request]]:
    """ragged: geometric lengths with mean max_tokens / 4, cut at max_tokens. even: all as long as that mean. quickstart: the
    quick start's model, prompts and lengths."""
    rng = np.random.default_rng(0)
    count = args.prompts * args.n
    mean = args.max_tokens / 4
    prompt_length, sizes = (7, QUICKSTART) if name == "quickstart" else (17, SMALL)
    lengths = {
        "ragged": np.minimum(rng.geometric(1 / mean, count), args.max_tokens),
        "even": np.full(count, int(mean)),
        "quickstart": np.full(count, 7),
    }[name]
    prompts = rng.integers(0, sizes["vocab_size"], (args.prompts, prompt_length)).repeat(args.n, axis=0)
    requests = [
        Request(i, tuple(prompt), Sampling(1.0, -1, 1.0, length, stop_token_ids=(), ignore_eos=True), seed=i)
        for i, (prompt, length) in enumerate(zip(prompts.tolist(), lengths.tolist(), strict=True))
    ]
    return sizes, requests


def embedded_engine(model: PreTrainedModel, requests: list[Request], max_num_seqs: int) -> Rollout:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(Path(folder))
        overrides = [f"actor_rollout_ref.model.path={folder}", "actor_rollout_ref.rollout.dtype=float32", "rollout=embedded"]
        config = compose("ppo_trainer", PPOConfig, [*overrides, f"actor_rollout_ref.rollout.max_num_seqs={max_num_seqs}"])
        longest = max(len(request.prompt_ids) + request.sampling.max_tokens for request in requests)
        spec = RolloutSpec(config.actor_rollout_ref.model, config.actor_rollout_ref.rollout, longest, "cpu")
        engine = EmbeddedRollout(spec)
    assert engine.share_weights(dict(model.named_parameters()), version=0)
    return engine


def run_embedded(engine: Rollout, requests: list[Request]) -> int:
    return sum(len(completion.token_ids) for completion in engine.generate(requests))


class Lengths(StoppingCriteria):
    """Each row ends at its own length; generate goes on until all have."""

    def __init__(self, prompt_length: int, lengths: list[int]) -> None:
        self.ends = torch.tensor(lengths) + prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: object) -> Tensor:
        return input_ids.shape[1] >= self.ends


def run_generate(model: Qwen2ForCausalLM, requests: list[Request], batch_size: int) -> int:
    made = 0
    for i in range(0, len(requests), batch_size):
        part = requests[i : i + batch_size]
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
