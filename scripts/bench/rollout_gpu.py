"""What a GPU alone can show of vLLM beside the trainer, on models with random weights, as JSON. One GPU, one process.

    python scripts/bench/rollout_gpu.py parity --shape 0.5b --dtype float32  # tokens and log-probs, over train, sleep, wake, sync
    python scripts/bench/rollout_gpu.py memory --shape 7b                    # what sleep frees, the peak of a sync, its seconds

Tokens per second are in rollout_gpu_speed.py.
Memory is the driver's count of the whole device, so that nothing hides in an allocator. Further arguments are overrides of the
configuration. `--device cpu --shape tiny` is the smoke version; with actor_rollout_ref.rollout.name=embedded it needs no vLLM.
"""

import argparse
import statistics
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from scripts.bench.shapes import SHAPES
from scripts.bench.weight_sync import bare_call
from scripts.bench.worker import Bench, command_line, make_requests, peak, run, timed, used
from workers.batch import Batch
from workers.engine.hf.hf_model import DTYPES
from workers.plan import Limits, make_plan
from workers.rollout.base import Completion, Request


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("what", choices=("parity", "memory"))
    run(parser, {"parity": parity, "memory": memory})


# Parity


def parity(args: argparse.Namespace) -> dict[str, Any]:
    """Greedy tokens beside transformers' own, sampled log-probs beside the trainer's: at first, and after each round of
    (train step, sleep, wake, sync)."""
    bench = Bench(args, trained=True)
    reference = AutoModelForCausalLM.from_pretrained(args.model, dtype=DTYPES[args.dtype]).to(args.device).eval()
    count, temperature = 16, 0.8
    greedy = make_requests(args, count, ragged=True, temperature=0.0, max_tokens=args.max_tokens // 4)
    sampled = make_requests(args, count, ragged=True, temperature=temperature, max_tokens=args.max_tokens // 4)
    batch = flat(sampled, [(1,) * 8] * count, temperature)
    rounds = []
    for version in range(args.rounds + 1):
        if version:
            plan = make_plan(batch.lengths.tolist(), 1, Limits(max_tokens=4096))
            bench.worker.run("actor", "train_step", weighted(batch), plan.micro_batches[0])
        bench.worker.run("rollout", "sync_weights", version)
        copy_weights(bench.weights(), reference)
        completions = bench.generate(greedy)
        assert {completion.weight_version for completion in completions} == {version}
        found = [beside_reference(reference, *pair) for pair in zip(greedy, completions, strict=True)]
        answers = bench.generate(sampled)
        batch = flat(sampled, [answer.token_ids for answer in answers], temperature)
        rounds.append(
            {
                "greedy answers equal": f"{sum(not differing for differing, _ in found)} of {count}",
                "greedy tokens before a divergence": sum(
                    differing[0]["at"] if differing else len(logs) for differing, logs in found
                ),
                "greedy tokens": sum(len(completion.token_ids) for completion in completions),
                "first divergences": [differing[0] for differing, _ in found if differing],
                "greedy log-prob difference": spread(torch.cat([logs for _, logs in found])),
                "sampled log-prob difference to the trainer": spread(beside_trainer(bench, batch, answers)),
            }
        )
    return {"start_seconds": bench.start_seconds, "rounds": rounds}


@torch.no_grad()
def copy_weights(weights: dict[str, Tensor], model: PreTrainedModel) -> None:
    own = model.state_dict()
    for name, weight in weights.items():
        own[name].copy_(weight)


@torch.no_grad()
def beside_reference(model: PreTrainedModel, request: Request, answer: Completion) -> tuple[list[dict[str, Any]], Tensor]:
    """Where transformers, given the same tokens before, would have chosen another one; and the log-prob differences (answer,)."""
    ids = torch.tensor([*request.prompt_ids, *answer.token_ids], device=model.device)
    logits = model(input_ids=ids[None], use_cache=False).logits[0, len(request.prompt_ids) - 1 : -1].float()
    tokens = ids[len(request.prompt_ids) :]
    best = logits.topk(2, dim=-1)
    behind = best.values[:, 0] - logits.gather(1, tokens[:, None])[:, 0]
    places = (best.indices[:, 0] != tokens).nonzero()[:, 0].tolist()
    differing = [{"at": i, "nats behind": float(behind[i]), "top-2 margin": float(best.values[i].diff().abs())} for i in places]
    theirs = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0].cpu()
    return differing, (theirs - torch.tensor(answer.log_probs)).abs()


def flat(requests: Sequence[Request], answers: Sequence[Sequence[int]], temperature: float) -> Batch:
    rows = [[*request.prompt_ids, *answer] for request, answer in zip(requests, answers, strict=True)]
    masks = [[0] * len(request.prompt_ids) + [1] * len(answer) for request, answer in zip(requests, answers, strict=True)]
    return Batch(
        lengths=torch.tensor([len(row) for row in rows]),
        tokens={"input_ids": torch.tensor([*chain(*rows)]), "response_mask": torch.tensor([*chain(*masks)])},
        meta={"temperature": temperature},
    )


def weighted(batch: Batch) -> Batch:
    mask = batch.tokens["response_mask"]
    return batch.with_tokens(loss_weight=mask / mask.sum())


def beside_trainer(bench: Bench, batch: Batch, answers: Sequence[Completion]) -> Tensor:
    """|log-prob of the engine - of the trainer| of each drawn token."""
    plan = make_plan(batch.lengths.tolist(), 1, Limits(max_tokens=4096))
    forward = bench.worker.run("actor", "forward", batch, plan.micro_batches[0], ["log_probs"], True)
    theirs = forward.tokens["log_probs"][batch.tokens["response_mask"].bool()]
    return (theirs - torch.tensor([value for answer in answers for value in answer.log_probs])).abs()


def spread(values: Tensor) -> dict[str, float]:
    return {"mean": float(values.mean()), "99 %": float(values.quantile(0.99)), "max": float(values.max())}


# Memory and sync


def memory(args: argparse.Namespace) -> dict[str, Any]:
    bench = Bench(args, trained=False)
    weights = bench.weights()
    size = DTYPES[args.dtype].itemsize
    numbers = sum({tensor.data_ptr(): tensor.numel() for tensor in weights.values()}.values())
    largest = max(tensor.numel() for tensor in weights.values()) * size
    requests = make_requests(args, 64, ragged=False, temperature=1.0, max_tokens=32)
    cycles = []
    for version in range(args.rounds):
        before = used(args.device)
        with peak(args.device) as highest:
            bench.worker.run("rollout", "sync_weights", version)
        synced = used(args.device)
        wake_seconds = timed(args.device, lambda: bench.worker.memory_scheduler.enter("generate"))
        answers = bench.generate(requests)
        awake = used(args.device)
        sleep_seconds = timed(args.device, bench.sleep)
        asleep = used(args.device)
        held = awake - bench.used["actor"]
        cycles.append(
            {
                "before sync": before,
                "peak of sync": highest[0],
                "peak above trainer and weights": highest[0] - before - numbers * size,
                "after sync": synced,
                "awake": awake,
                "asleep": asleep,
                "engine held": held,
                "share freed": (awake - asleep) / held,
                "sleep seconds": sleep_seconds,
                "wake cache seconds": wake_seconds,
                "answers": len(answers),
            }
        )
    return {
        "start_seconds": bench.start_seconds,
        "weights": numbers * size,
        "largest tensor": largest,
        "cache": int(bench.engine.stats()["cache_bytes"]),
        "used": bench.used,
        "cycles": cycles,
        "seconds": sync_seconds(args, bench, numbers * size),
    }


def sync_seconds(args: argparse.Namespace, bench: Bench, size: int) -> dict[str, Any]:
    """Medians, and bytes/s, of a sync with the engine asleep before it; of its two parts; of the engine's own call, when it woke
    just as before ours; of memcpy."""
    source = {name: tensor.detach().to(DTYPES[args.dtype]) for name, tensor in bench.weights().items()}
    if SHAPES[args.shape]["tie_word_embeddings"]:
        del source["lm_head.weight"]
    pairs = [(tensor, torch.empty_like(tensor)) for tensor in source.values()]
    found: dict[str, list[float]] = {"sync": [], "wake": [], "load": [], "bare": [], "memcpy": []}

    def sync() -> None:
        bench.worker.run("rollout", "sync_weights", 0)

    bare = torch.no_grad()(bare_call(bench.engine, list(source.items()), DTYPES[args.dtype]))

    def copy() -> None:
        for tensor, copied in pairs:
            copied.copy_(tensor)

    for _ in range(args.rounds + 1):
        bench.sleep()
        found["sync"].append(timed(args.device, sync))
        bench.sleep()
        found["wake"].append(timed(args.device, lambda: bench.worker.memory_scheduler.enter("sync", "actor")))
        found["load"].append(timed(args.device, sync))
        bench.sleep()
        bench.worker.memory_scheduler.enter("sync", "actor")
        found["bare"].append(timed(args.device, bare))
        found["memcpy"].append(timed(args.device, copy))
    medians = {name: statistics.median(seconds[1:]) for name, seconds in found.items()}  # the first round warms up
    return {name: {"seconds": median, "GB/s": size / median / 1e9, "all": found[name]} for name, median in medians.items()}


if __name__ == "__main__":
    main()
