"""What a GPU alone can show of vLLM beside the trainer, on models with random weights, as JSON. One GPU, one process.

    python scripts/bench/rollout_gpu.py parity --shape 0.5b --dtype float32  # tokens and log-probs, over train, sleep, wake, sync
    python scripts/bench/rollout_gpu.py memory --shape 7b                    # what sleep frees, the peak of a sync, its seconds

Tokens per second are in rollout_gpu_speed.py.
Memory is the driver's count of the whole device, so that nothing hides in an allocator. `--device cpu --shape tiny` is the smoke
version. Further arguments are overrides of the configuration.
"""

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from configs.compose import compose
from configs.schema.ppo import PPOConfig
from scripts.bench.shapes import SHAPES, Likelihood
from workers.batch import Batch
from workers.controller.group import WorkerInfo
from workers.controller.shell import free_port
from workers.engine.base import EngineSpec, LossSpec, OptimizerSpec
from workers.engine.hf_model import DTYPES
from workers.host import Host
from workers.plan import Limits, make_plan
from workers.roles.model import ModelRole
from workers.roles.rollout import RolloutRole
from workers.rollout.base import Completion, Request, RolloutSpec, Sampling
from workers.rollout.vllm import VLLMRollout


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("what", choices=("parity", "memory"))
    run(parser, {"parity": parity, "memory": memory})


def command_line(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.5b", help="Qwen2.5's of that size (default: %(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of the engine")
    parser.add_argument("--trainer_dtype", choices=("float32", "bfloat16"), default=None, help="(default: the engine's)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--rounds", type=int, default=3, help="train steps, or repetitions (default: %(default)s)")
    parser.add_argument("--prompt_tokens", type=int, default=128, help="(default: %(default)s)")
    parser.add_argument("--max_tokens", type=int, default=256, help="of an answer; in parity a quarter (default: %(default)s)")
    parser.add_argument("--model", type=Path, default=None, help="where the model is kept, and made if it is not there")
    return parser


def run(parser: argparse.ArgumentParser, measurements: dict[str, Callable[[argparse.Namespace], dict[str, Any]]]) -> None:
    args, args.overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        args.model = args.model or Path(folder)
        save_model(args)
        measured = measurements[args.what](args)
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    settings = {name: str(value) for name, value in vars(args).items()} | {"torch": torch.__version__, "device": device}
    print(json.dumps({"settings": settings, **measured}, indent=1))


# The model and the two sides


def save_model(args: argparse.Namespace) -> None:
    if (args.model / "config.json").exists():
        return
    torch.manual_seed(0)
    config = Qwen2Config(max_position_embeddings=4096, bos_token_id=None, eos_token_id=1, pad_token_id=0, **SHAPES[args.shape])
    with torch.device(args.device):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[args.trainer_dtype or args.dtype])
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, 0.0, 0.1)
    model.save_pretrained(args.model)


def likelihood(config: None) -> Any:
    return Likelihood()


def configure(args: argparse.Namespace) -> PPOConfig:
    trained = args.trainer_dtype or args.dtype
    return compose(
        "ppo_trainer",
        PPOConfig,
        [
            f"actor_rollout_ref.model.path={args.model}",
            "actor_rollout_ref.model.enable_gradient_checkpointing=false",
            f"actor_rollout_ref.actor.fsdp_config.model_dtype={trained}",
            f"actor_rollout_ref.actor.fsdp_config.dtype={args.dtype}",
            "actor_rollout_ref.rollout.name=vllm",
            "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
            f"actor_rollout_ref.rollout.dtype={args.dtype}",
            *args.overrides,
        ],
    )


def rollout_spec(args: argparse.Namespace) -> RolloutSpec:
    models = configure(args).actor_rollout_ref
    return RolloutSpec(models.model, models.rollout, args.prompt_tokens + args.max_tokens, args.device)


class Bench:
    """A worker as a run has it: the actor, and the engine beside it."""

    def __init__(self, args: argparse.Namespace, *, trained: bool) -> None:
        self.device = args.device
        models = configure(args).actor_rollout_ref
        optimizer = OptimizerSpec(
            lr=1e-4, betas=(0.9, 0.999), weight_decay=0.0, schedule="constant", warmup_steps=0, total_steps=100,
            min_lr_ratio=0.0, num_cycles=0.5, clip_grad=1.0,
        )  # fmt: skip
        self.host = Host(WorkerInfo(0, 1, 0, 0, "127.0.0.1", free_port()), args.device, 1800.0)
        self.used = {"before": used(args.device)}
        spec = EngineSpec(models.model, "lm", models.actor.sharding, optimizer if trained else None, args.device, 0)
        self.host.build_model("actor", spec, LossSpec(f"{__name__}:likelihood", None) if trained else None)
        self.used["actor"] = used(args.device)
        start = time.perf_counter()
        self.host.build_rollout("rollout", rollout_spec(args), "actor")
        self.start_seconds = time.perf_counter() - start
        self.used["actor, engine asleep"] = used(args.device)
        actor, rollout = self.host.roles["actor"], self.host.roles["rollout"]
        assert isinstance(actor, ModelRole) and isinstance(rollout, RolloutRole)
        assert isinstance(rollout.rollout, VLLMRollout)
        self.actor, self.rollout, self.engine = actor, rollout, rollout.rollout

    def weights(self) -> dict[str, Tensor]:
        live = self.actor.engine.live_weights()
        assert live is not None, "one rank: nothing is sharded"
        return live

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        self.host.residency.enter("generate")
        return self.engine.generate(requests)

    def sleep(self) -> None:
        """As the trainer's next phase does."""
        self.host.residency.enter("forward", "actor")


def make_requests(args: argparse.Namespace, count: int, *, ragged: bool, temperature: float, max_tokens: int) -> list[Request]:
    draw = torch.Generator().manual_seed(1)
    sampling = Sampling(temperature, -1, 1.0, max_tokens, stop_token_ids=(), ignore_eos=True)
    lengths = [args.prompt_tokens] * count
    if ragged:
        lengths = torch.randint(1, args.prompt_tokens + 1, (count,), generator=draw).tolist()
    vocabulary = SHAPES[args.shape]["vocab_size"]
    prompts = [torch.randint(2, vocabulary, (length,), generator=draw).tolist() for length in lengths]
    return [Request(i, tuple(prompt), sampling, seed=1000 + i) for i, prompt in enumerate(prompts)]


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
            bench.host.run("actor", "train_step", weighted(batch), plan.micro_batches[0])
        bench.host.run("rollout", "sync_weights", version)
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
    forward = bench.host.run("actor", "forward", batch, plan.micro_batches[0], ["log_probs"])
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
            bench.host.run("rollout", "sync_weights", version)
        synced = used(args.device)
        answers = bench.generate(requests)
        awake = used(args.device)
        bench.sleep()
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
    """Medians, and bytes/s, of a sync with the engine asleep before it; of its two parts; of vLLM's own call, when the engine
    woke just as before ours; of memcpy."""
    source = {name: tensor.detach().to(DTYPES[args.dtype]) for name, tensor in bench.weights().items()}
    if SHAPES[args.shape]["tie_word_embeddings"]:
        del source["lm_head.weight"]
    pairs = [(tensor, torch.empty_like(tensor)) for tensor in source.values()]
    found: dict[str, list[float]] = {"sync": [], "wake": [], "load": [], "bare reload_weights": [], "memcpy": []}

    def sync() -> None:
        bench.host.run("rollout", "sync_weights", 0)

    @torch.no_grad()
    def bare() -> None:
        bench.engine._on_worker("reload_weights", weights_iterator=iter(source.items()))

    def copy() -> None:
        for tensor, copied in pairs:
            copied.copy_(tensor)

    for _ in range(args.rounds + 1):
        bench.sleep()
        found["sync"].append(timed(args.device, sync))
        bench.sleep()
        found["wake"].append(timed(args.device, lambda: bench.host.residency.enter("sync", "actor")))
        found["load"].append(timed(args.device, sync))
        bench.sleep()
        bench.host.residency.enter("sync", "actor")
        found["bare reload_weights"].append(timed(args.device, bare))
        found["memcpy"].append(timed(args.device, copy))
    medians = {name: statistics.median(seconds[1:]) for name, seconds in found.items()}  # the first round warms up
    return {name: {"seconds": median, "GB/s": size / median / 1e9, "all": found[name]} for name, median in medians.items()}


def timed(device: str, work: Callable[[], Any]) -> float:
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def used(device: str) -> int:
    """Bytes of the device that are not free, as the driver counts; what torch keeps for later is given back first."""
    if device == "cpu":
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    synchronize(device)
    torch.cuda.empty_cache()
    return taken()


def taken() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


@contextmanager
def peak(device: str) -> Iterator[list[int]]:
    """The highest count of the driver meanwhile, looked at every millisecond."""
    look = taken if device == "cuda" else (lambda: used(device))
    highest, over = [look()], threading.Event()

    def watch() -> None:
        while not over.wait(0.001):
            highest[0] = max(highest[0], look())

    thread = threading.Thread(target=watch)
    thread.start()
    yield highest
    over.set()
    thread.join()


if __name__ == "__main__":
    main()
