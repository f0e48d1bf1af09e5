"""Peak memory of one worker by phase (sync, generate, log-probs, update, rest); the update's over the minimum it needs.

    python scripts/bench/memory.py --shape 7b                            # one GPU, vLLM on the actor's GPU, 8k packed tokens
    python scripts/bench/memory.py --shape vocabulary --device cpu       # a vocabulary of 151,936, hidden states of 64
    python scripts/bench/memory.py --quick                               # the same, seconds

On the CPU, memory is the bytes of live tensors, counted at each operation, and the engine is the embedded one, in float32. On
CUDA it is counted by torch's allocator, which includes addresses that a sleeping vLLM only reserves; the update's figure excludes
them. The device columns are counted by the driver for the whole device, and include the engine's own pools. must: parameters,
gradients and moments, each layer's input, and a chunk of the head: three times C x V numbers in float32, and its weight's
gradient. Further arguments are overrides of the configuration. A table goes to stderr, JSON to stdout.
"""

import argparse
import json
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from configs.compose import compose
from configs.schema.ppo import PPOConfig
from data_preprocess.tiny_model import character_tokenizer
from scripts.bench.shapes import ADAMW, SHAPES, likelihood, qwen2, random_rows
from scripts.bench.train import ragged
from trainer.planner.memory_model import FLOAT32, Setting, Shape, layer_inputs, moments, parameters
from workers.controller.group import WorkerInfo
from workers.controller.ports import free_port
from workers.engine.base import EngineSpec, LossSpec
from workers.engine.hf.hf_model import DTYPES
from workers.engine.logprob import chunk_size
from workers.roles.model_role import ModelRole
from workers.roles.rollout_role import RolloutRole
from workers.roles.worker import Worker
from workers.rollout.base import Completion, Request, RolloutSpec, Sampling

COLUMNS = ("phase", "peak MB", "after MB", "device, peak MB", "device, after MB", "largest tensor MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.5b", help="the size of a Qwen2.5 model (default: %(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of the rollout engine")
    parser.add_argument("--trainer_dtype", choices=("float32", "bfloat16"), default=None, help="(default: the engine's)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--rounds", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--prompt_tokens", type=int, default=128, help="(default: %(default)s)")
    parser.add_argument("--max_tokens", type=int, default=256, help="of a response (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=8192, help="of the packed micro-batch (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="on the CPU, a vocabulary of 151,936, 1,024 tokens")
    if "--quick" in sys.argv:
        parser.set_defaults(device="cpu", shape="vocabulary", tokens=1024, rounds=1, prompt_tokens=8, max_tokens=8)
    args, args.overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        args.model = Path(folder)
        save_model(args)
        measured = phases(args)
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    settings = {name: str(value) for name, value in vars(args).items()} | {"torch": torch.__version__, "device": device}
    print(json.dumps({"settings": settings, **measured}, indent=1))


def save_model(args: argparse.Namespace) -> None:
    """Save a model with random weights and a tokenizer of digits to ``args.model``."""
    torch.manual_seed(0)
    with torch.device(args.device):
        model = AutoModelForCausalLM.from_config(qwen2(args.shape), dtype=DTYPES[args.trainer_dtype or args.dtype])
    model.save_pretrained(args.model)
    character_tokenizer("0123456789=").save_pretrained(args.model)


class Bench:
    """A worker as in a run: the actor and a rollout engine on the same device."""

    def __init__(self, args: argparse.Namespace) -> None:
        trained = args.trainer_dtype or args.dtype
        models = compose(
            "ppo_trainer",
            PPOConfig,
            [
                f"actor_rollout_ref.model.path={args.model}",
                f"actor_rollout_ref.actor.fsdp_config.model_dtype={trained}",
                f"actor_rollout_ref.actor.fsdp_config.dtype={args.dtype}",
                "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
                f"actor_rollout_ref.rollout.dtype={args.dtype}",
                *args.overrides,
            ],
        ).actor_rollout_ref
        self.worker = Worker(WorkerInfo(0, 1, 0, 0, "127.0.0.1", free_port()), args.device, 1800.0)
        spec = EngineSpec(models.model, "lm", models.actor.sharding, ADAMW, args.device, 0)
        self.worker.build_model("actor", spec, LossSpec(f"{likelihood.__module__}:{likelihood.__name__}", None))
        longest = args.prompt_tokens + args.max_tokens
        self.worker.build_rollout("rollout", RolloutSpec(models.model, models.rollout, longest, args.device), "actor")
        actor, rollout = self.worker.roles["actor"], self.worker.roles["rollout"]
        assert isinstance(actor, ModelRole) and isinstance(rollout, RolloutRole)
        self.actor, self.engine = actor, rollout.rollout

    def close(self) -> None:
        self.worker.close()

    def weights(self) -> dict[str, Tensor]:
        live = self.actor.engine.live_weights()
        assert live is not None, "one rank: nothing is sharded"
        return live

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        self.worker.memory_scheduler.enter("generate")
        return self.engine.generate(requests)


def make_requests(args: argparse.Namespace, count: int) -> list[Request]:
    """Prompts of 1 to --prompt_tokens random tokens; every response has --max_tokens tokens."""
    generator = torch.Generator().manual_seed(1)
    sampling = Sampling(1.0, -1, 1.0, args.max_tokens, stop_token_ids=(), ignore_eos=True)
    lengths = torch.randint(1, args.prompt_tokens + 1, (count,), generator=generator).tolist()
    vocabulary = SHAPES[args.shape]["vocab_size"]
    prompts = [torch.randint(2, vocabulary, (length,), generator=generator).tolist() for length in lengths]
    return [Request(i, tuple(prompt), sampling, seed=1000 + i) for i, prompt in enumerate(prompts)]


class Alive(TorchDispatchMode):
    """Bytes of all live storages that operations have touched: ``now``, at the peak (``most``), and of the largest one."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._storages: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet(tensor.untyped_storage() for tensor in tensors)
        self.most = self.largest = 0

    @property
    def now(self) -> int:
        return sum(storage.nbytes() for storage in self._storages)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, out)):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                self._storages.add(tensor.untyped_storage())
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        self.most = max(self.most, self.now)
        return out


def phases(args: argparse.Namespace) -> dict[str, Any]:
    """Memory of each phase in the last round; earlier rounds make what is allocated once."""
    cpu = args.device == "cpu"
    chosen = [
        "actor_rollout_ref.model.enable_gradient_checkpointing=true",
        f"actor_rollout_ref.rollout.name={'embedded' if cpu else 'vllm'}",
    ]
    if cpu:
        args.dtype = "float32"
    args.overrides = [*chosen, *args.overrides]
    requests = make_requests(args, 16)
    rows = random_rows(args.shape, ragged(args.tokens, args.tokens // 8))
    plan = (tuple(range(len(rows))),)
    found = {}
    with closing(Bench(args)) as bench:
        steps: dict[str, Callable[[], Any]] = {
            "sync": lambda: bench.worker.roles["rollout"].sync_weights(0),
            "generate": lambda: bench.generate(requests),
            "log-probs": lambda: bench.worker.roles["actor"].forward(rows, plan, ["log_probs"], True),
            "update": lambda: bench.worker.roles["actor"].train_step(rows, plan),
            "rest": lambda: bench.worker.memory_scheduler.enter("rest"),
        }
        kept = [*bench.weights().values(), *bench.actor.engine._optimizer.moments().values()]
        alive = Alive(kept) if cpu else None
        for _ in range(args.rounds):
            for name, step in steps.items():
                with measured(alive) as memory:
                    step()
                found[name] = memory
        asleep = 0 if cpu else found["rest"]["after"] - sum(tensor.nbytes for tensor in kept)
    shape = Shape.of(SHAPES[args.shape])
    setting = Setting(kept=DTYPES[args.trainer_dtype or args.dtype].itemsize, compute=DTYPES[args.dtype].itemsize)
    must = needed(shape, setting, args.tokens)
    highest = found["update"]["peak"] - asleep
    result = {
        "phases": found,
        "update": {
            "must": must,
            "peak": highest,
            "of_must": highest / sum(must.values()),
            "tokens_by_vocabulary": FLOAT32 * args.tokens * shape.vocabulary,
            "chunk": FLOAT32 * chunk_size(shape.vocabulary) * shape.vocabulary,
        },
    }
    print(table(result), file=sys.stderr)
    return result


def needed(shape: Shape, setting: Setting, tokens: int) -> dict[str, float]:
    """Minimum bytes of an update, by part."""
    return {
        "parameters": parameters(shape, setting),
        "gradients": parameters(shape, setting),
        "moments": moments(shape, setting),
        "layer inputs": tokens * layer_inputs(shape, setting, shape.layers),
        "head's chunk": 3.0 * FLOAT32 * chunk_size(shape.vocabulary) * shape.vocabulary,
        "head's gradient": float(FLOAT32 * shape.vocabulary * shape.hidden),
    }


@contextmanager
def measured(alive: Alive | None) -> Iterator[dict[str, float]]:
    """Bytes at the peak of the block and after it; on CUDA its seconds too. alive: None on CUDA."""
    memory: dict[str, float] = {}
    if alive is not None:
        alive.most, alive.largest = alive.now, 0
        with alive:
            yield memory
        memory |= {"peak": alive.most, "after": alive.now, "largest tensor": alive.largest}
        return
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    with device_peak() as highest:
        yield memory
        torch.cuda.synchronize()
        memory["seconds"] = time.perf_counter() - start
    memory |= {"peak": torch.cuda.max_memory_allocated(), "device, peak": highest[0]}
    torch.cuda.empty_cache()
    memory |= {"after": torch.cuda.memory_allocated(), "device, after": taken()}


def taken() -> int:
    """Bytes of the device that are not free, counted by the driver."""
    free, total = torch.cuda.mem_get_info()
    return total - free


@contextmanager
def device_peak() -> Iterator[list[int]]:
    """The maximum of `taken`, polled every millisecond."""
    highest, over = [taken()], threading.Event()

    def watch() -> None:
        while not over.wait(0.001):
            highest[0] = max(highest[0], taken())

    thread = threading.Thread(target=watch)
    thread.start()
    yield highest
    over.set()
    thread.join()


def table(result: dict[str, Any]) -> str:
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for phase, memory in result["phases"].items():
        cells = (
            f"{memory[name.removesuffix(' MB')] / 1e6:.0f}" if name.removesuffix(" MB") in memory else "" for name in COLUMNS[1:]
        )
        lines.append(f"| {phase} | " + " | ".join(cells) + " |")
    update = result["update"]
    parts = ", ".join(f"{name} {size / 1e6:.0f}" for name, size in update["must"].items())
    lines.append(f"update: {update['peak'] / 1e6:.0f} MB, {update['of_must']:.2f} x of what it must have ({parts})")
    lines.append(f"T x V in float32 would be {update['tokens_by_vocabulary'] / 1e6:.0f} MB")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
