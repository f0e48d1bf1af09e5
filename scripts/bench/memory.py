"""Peak memory of one worker, phase by phase: sync, generate, log-probs, update, rest; and the update's beside what it must have.

    python scripts/bench/memory.py --shape 7b                            # one GPU, vLLM beside the actor, 8k packed tokens
    python scripts/bench/memory.py --shape vocabulary --device cpu       # 151,936 tokens to choose from, hidden states of 64
    python scripts/bench/memory.py --quick                               # the same, seconds

On the CPU memory is bytes of tensors alive, counted operation by operation, and the engine is the embedded one, in float32. On
CUDA it is what torch's allocator counts, addresses that a sleeping vLLM only keeps among it, which the update's figure leaves
out; and beside it what the driver counts of the whole device, where the engine's own pools show. must: parameters, gradients
and moments, each layer's input, and a chunk of the head: three times C x V numbers in float32, and its weight's gradient.
Further arguments are overrides of the configuration. A table goes to stderr, JSON to stdout.
"""

import argparse
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scripts.bench.shapes import SHAPES, random_rows
from scripts.bench.train import ragged
from scripts.bench.worker import Bench, command_line, make_requests, peak, run, taken
from trainer.planner.memory_model import FLOAT32, Setting, Shape, layer_inputs, moments, parameters
from workers.engine.hf.hf_model import DTYPES
from workers.engine.logprob import chunk_size

COLUMNS = ("phase", "peak MB", "after MB", "device, peak MB", "device, after MB", "largest tensor MB")


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--tokens", type=int, default=8192, help="of the packed micro-batch (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="on the CPU, a vocabulary of 151,936, 1,024 tokens")
    parser.set_defaults(what="phases", rounds=2)
    if "--quick" in sys.argv:
        parser.set_defaults(device="cpu", shape="vocabulary", tokens=1024, rounds=1, prompt_tokens=8, max_tokens=8)
    run(parser, {"phases": phases})


class Alive(TorchDispatchMode):
    """Bytes of all storages that operations have touched and somebody still holds: ``now``, the most there were at once, and of
    the largest that appeared."""

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
    """Of the last round; the rounds before it make what is made once."""
    cpu = args.device == "cpu"
    chosen = ["actor_rollout_ref.model.enable_gradient_checkpointing=true"]
    if cpu:
        args.dtype = "float32"
        chosen.append("actor_rollout_ref.rollout.name=embedded")
    args.overrides = [*chosen, *args.overrides]
    requests = make_requests(args, 16, ragged=True, temperature=1.0, max_tokens=args.max_tokens)
    rows = random_rows(args.shape, ragged(args.tokens, args.tokens // 8))
    plan = (tuple(range(len(rows))),)
    found = {}
    with closing(Bench(args, trained=True)) as bench:
        steps: dict[str, Callable[[], Any]] = {
            "sync": lambda: bench.worker.run("rollout", "sync_weights", 0),
            "generate": lambda: bench.generate(requests),
            "log-probs": lambda: bench.worker.run("actor", "forward", rows, plan, ["log_probs"], True),
            "update": lambda: bench.worker.run("actor", "train_step", rows, plan),
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
    """Bytes of an update that nothing of it could do without."""
    return {
        "parameters": parameters(shape, setting),
        "gradients": parameters(shape, setting),
        "moments": moments(shape, setting),
        "layer inputs": tokens * layer_inputs(shape, setting, shape.layers),
        "head's chunk": 3.0 * FLOAT32 * chunk_size(shape.vocabulary) * shape.vocabulary,
        "head's gradient": float(FLOAT32 * shape.vocabulary * shape.hidden),
    }


@contextmanager
def measured(alive: Alive | None) -> Iterator[dict[str, int]]:
    """Bytes meanwhile and afterwards. alive: on the CPU."""
    memory: dict[str, int] = {}
    if alive is not None:
        alive.most, alive.largest = alive.now, 0
        with alive:
            yield memory
        memory |= {"peak": alive.most, "after": alive.now, "largest tensor": alive.largest}
        return
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with peak("cuda") as highest:
        yield memory
        torch.cuda.synchronize()
    memory |= {"peak": torch.cuda.max_memory_allocated(), "device, peak": highest[0]}
    torch.cuda.empty_cache()
    memory |= {"after": torch.cuda.memory_allocated(), "device, after": taken()}


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
