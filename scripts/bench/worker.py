"""A worker as a run has it, the actor and a rollout engine beside it, on random weights; and what it takes of the device.

python scripts/bench/worker.py --shape 7b --model DIR    # makes the model alone, with a tokenizer of digits
"""

import argparse
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from configs.compose import compose
from configs.schema.ppo import PPOConfig
from data_preprocess.tiny_model import character_tokenizer
from scripts.bench.shapes import ADAMW, SHAPES, likelihood, qwen2
from workers.controller.actor import free_port
from workers.controller.group import WorkerInfo
from workers.engine.base import EngineSpec, LossSpec
from workers.engine.hf.hf_model import DTYPES
from workers.roles.model_role import ModelRole
from workers.roles.rollout_role import RolloutRole
from workers.roles.worker import Worker
from workers.rollout.base import Completion, Request, RolloutSpec, Sampling


def main() -> None:
    parser = command_line(__doc__)
    parser.set_defaults(what="model")
    run(parser, {"model": lambda args: {"model": str(args.model)}})


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


def save_model(args: argparse.Namespace) -> None:
    if (args.model / "config.json").exists():
        return
    torch.manual_seed(0)
    with torch.device(args.device):
        model = AutoModelForCausalLM.from_config(qwen2(args.shape), dtype=DTYPES[args.trainer_dtype or args.dtype])
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, 0.0, 0.1)
    model.save_pretrained(args.model)
    character_tokenizer("0123456789=").save_pretrained(args.model)


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
        self.worker = Worker(WorkerInfo(0, 1, 0, 0, "127.0.0.1", free_port()), args.device, 1800.0)
        self.used = {"before": used(args.device)}
        spec = EngineSpec(models.model, "lm", models.actor.sharding, ADAMW if trained else None, args.device, 0)
        self.worker.build_model(
            "actor", spec, LossSpec(f"{likelihood.__module__}:{likelihood.__name__}", None) if trained else None
        )
        self.used["actor"] = used(args.device)
        start = time.perf_counter()
        self.worker.build_rollout("rollout", rollout_spec(args), "actor")
        self.start_seconds = time.perf_counter() - start
        self.used["actor, engine asleep"] = used(args.device)
        actor, rollout = self.worker.roles["actor"], self.worker.roles["rollout"]
        assert isinstance(actor, ModelRole) and isinstance(rollout, RolloutRole)
        self.actor, self.rollout, self.engine = actor, rollout, rollout.rollout

    def close(self) -> None:
        self.worker.close()

    def weights(self) -> dict[str, Tensor]:
        live = self.actor.engine.live_weights()
        assert live is not None, "one rank: nothing is sharded"
        return live

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        self.worker.memory_scheduler.enter("generate")
        return self.engine.generate(requests)

    def sleep(self) -> None:
        """As the trainer's next phase does."""
        self.worker.memory_scheduler.enter("forward", "actor")


def make_requests(args: argparse.Namespace, count: int, *, ragged: bool, temperature: float, max_tokens: int) -> list[Request]:
    draw = torch.Generator().manual_seed(1)
    sampling = Sampling(temperature, -1, 1.0, max_tokens, stop_token_ids=(), ignore_eos=True)
    lengths = [args.prompt_tokens] * count
    if ragged:
        lengths = torch.randint(1, args.prompt_tokens + 1, (count,), generator=draw).tolist()
    vocabulary = SHAPES[args.shape]["vocab_size"]
    prompts = [torch.randint(2, vocabulary, (length,), generator=draw).tolist() for length in lengths]
    return [Request(i, tuple(prompt), sampling, seed=1000 + i) for i, prompt in enumerate(prompts)]


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
