"""Measured steps per second of partial rollouts over synchronous ones, on a real engine, and what rollout_flow.py predicts.

    python scripts/bench/partial_rollouts.py --device cuda --engine vllm     # 0.5B, responses up to 8k tokens, minutes
    python scripts/bench/partial_rollouts.py --shape 3m --prompts 16 --n 4 --prompt_tokens 32 --max_tokens 512 --slots 32
    python scripts/bench/partial_rollouts.py --quick                         # a smoke version, seconds

Sampler, policies, buffer, scheduler and flow are the trainer's; prompts, response lengths and rewards are those of
rollout_flow.py: a response ends at its length, whatever the model (random weights) samples. One engine, in this process. First
its decode steps of several numbers of sequences, its prefill c and the cost d of entering are measured, with the contexts of
responses that fill the slots, then synchronous steps, then partial ones. A shared machine is now slower, now faster: each mode is
simulated with the decode steps that the engine took in that mode. Seconds are those of the engine's calls and of weight syncs:
wall seconds on CUDA, CPU seconds on the CPU.

a, b, c, d: see rollout_flow.py. decode: seconds of decode steps by number of sequences, before the modes and in each of them.
ratio: steps per second of partial rollouts over synchronous ones, measured and simulated. per_token: the same of tokens per
second, which depends less on the lengths in a few steps. wall_seconds: with the controller, whose work a trainer overlaps with
generation.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean, median
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from configs.compose import compose
from configs.schema.generation import GenerationConfig
from scripts.bench.rollout_flow import Settings, SimulatedEngine, SimulatedRequest, Simulation
from scripts.bench.shapes import SHAPES
from workers.batch import Batch
from workers.controller.group import WorkerInfo
from workers.controller.local_backend import LocalBackend
from workers.controller.rpc import role_call
from workers.roles.rollout_engines import ENGINES, make_rollout
from workers.roles.rollout_role import answers, suspended
from workers.roles.worker import Worker
from workers.rollout.base import Completion, Request, RolloutSpec, Sampling

DECODE_STEPS, ENTERING = 64, 16  # measured for each number of sequences
SETTLED = 3  # steps after which a request that could enter has done so, also where the engine schedules ahead
FEWEST = 16  # steps of a number of sequences in a mode, for a median
Points = tuple[tuple[int, float], ...]
"""(Running sequences, seconds of a decode step), ascending."""


class MeasuredEngine(SimulatedEngine):
    """A real engine. A response ends at its length. meta of ``advance``: as simulated, with measured seconds."""

    def __init__(
        self,
        info: WorkerInfo,
        settings: Settings,
        engine: str,
        device: Literal["cpu", "cuda"],
        path: str,
        memory: float,
        longest: int | None = None,
    ) -> None:
        """path: folder of the model. memory: fraction of the GPU's memory for the engine. longest: tokens of a sequence; None: a
        prompt with a response.
        """
        super().__init__(info, settings)
        self._opened = ExitStack()
        worker = self._opened.enter_context(closing(Worker(info, device, 1800.0)))
        rollout = {
            "name": engine, "max_num_seqs": settings.slots, "tensor_model_parallel_size": 1, "free_cache_engine": False,
            "gpu_memory_utilization": memory, "dtype": "bfloat16" if device == "cuda" else "float32",
        }  # fmt: skip
        overrides = [f"actor_rollout_ref.model.path={path}", f"trainer.device={device}"]
        overrides += [f"actor_rollout_ref.rollout.{key}={value}" for key, value in rollout.items()]
        models = compose("generation", GenerationConfig, overrides).actor_rollout_ref
        longest = longest or settings.prompt_tokens + settings.max_tokens
        spec = RolloutSpec(models.model, models.rollout, longest, device)
        self.rollout = self._opened.enter_context(closing(make_rollout(spec, worker.info)))
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        model = Qwen2ForCausalLM.from_pretrained(path, dtype=dtype).to(device)
        self._weights, self._vocabulary = dict(model.named_parameters()), model.config.vocab_size
        self._clock: Callable[[], float] = time.perf_counter if device == "cuda" else time.process_time
        self._sync_seconds = 0.0
        self._since = 0  # steps since a request may have entered
        self._decoding = defaultdict[int, list[float]](list)  # seconds of the steps that only decoded, by running sequences

    def close(self) -> None:
        self._opened.close()

    def sync_weights(self, version: int, keep_cache: bool = False) -> dict[str, Any]:
        start = self._clock()
        self.rollout.load_weights(iter(self.rollout.to_engine_names(self._weights.items())), version=version)
        self._sync_seconds += self._clock() - start
        return {}

    def advance(self, prompts: Batch | None, sampling: Sampling, steps: int) -> Batch:
        start = self._clock()
        if prompts is not None:
            rows = map(Tensor.tolist, prompts.split_rows("input_ids"))
            new = zip(self._requests(prompts), rows, prompts.rows["seed"].tolist(), strict=True)
            self.rollout.submit([forced(request, ids, seed) for request, ids, seed in new])
            self._since = 0
        ended: list[Completion] = []
        sequence_seconds = 0.0
        while steps and self.rollout.unfinished:
            before, unfinished = self._clock(), self.rollout.unfinished
            running = min(unfinished, self._settings.slots)
            new_ended = self.rollout.step()
            spent = self._clock() - before
            sequence_seconds += spent * running
            if self._since >= SETTLED:
                self._decoding[running].append(spent)
            self._since = 0 if new_ended and unfinished > running else self._since + 1
            ended += new_ended
            steps -= 1
        seconds, self._sync_seconds = self._clock() - start + self._sync_seconds, 0.0
        return answers(ended).with_meta({"seconds": seconds, "sequence_seconds": sequence_seconds})

    def suspend(self) -> Batch:
        start = self._clock()
        interrupted = suspended(self.rollout.abort())
        return interrupted.with_meta({"seconds": self._clock() - start, "sequence_seconds": 0.0})

    def decode_steps(self, before: Points) -> Points:
        """Seconds of the decode steps since the last call; before: those of ``costs``."""
        taken, self._decoding = self._decoding, defaultdict(list)
        return decode_points(taken, before)

    def costs(self) -> dict[str, Any]:
        """Measured a, b, c, d and decode of Settings; a and b by least squares over a few numbers of sequences. Steps of few
        sequences take longer than that line, and a synchronous step ends with many of them.
        """
        counts = sorted({1, *(max(1, self._settings.slots * share // 32) for share in (1, 4, 8, 16, 32))})
        for count in counts:
            self._decode(count, seed=0)  # compiles, captures and allocates
        decode, prefill, entering = zip(*(self._decode(count, seed=1) for count in counts), strict=True)
        print(f"decode step of {counts} sequences: {[f'{seconds:.3g}' for seconds in decode]} s", file=sys.stderr, flush=True)
        # A tiny model's slope is below the noise of a loaded machine, and no sequence makes a step shorter.
        b = max(0.0, np.polyfit(counts, decode, 1)[0].item())
        a = mean(decode) - b * mean(counts)
        points = tuple(zip(counts, decode, strict=True))
        return {"a": a, "b": b, "c": mean(prefill), "d": max(0.0, mean(entering) - mean(decode)), "decode": points}

    def _decode(self, count: int, *, seed: int) -> tuple[float, float, float]:
        """Seconds of a decode step of ``count`` sequences, of prefill per token, and of a decode step in which one of the
        sequences ends and a request enters, whose prompt is computed already. seed: another one has other prompts.
        """
        settings, draws = self._settings, np.random.default_rng((count, seed))
        length = min(4 * DECODE_STEPS, settings.max_tokens - settings.max_tokens // 8)  # ends after the measurement
        # Where geometric responses are that fill the slots: the positions have the distribution of the lengths.
        places = np.minimum(draws.geometric(8 / settings.max_tokens, count), settings.max_tokens - length)
        tokens = [draws.integers(0, self._vocabulary, settings.prompt_tokens + place).tolist() for place in places]
        start = self._clock()
        self.rollout.submit([Request(i, tuple(ids), limited(length), seed=i) for i, ids in enumerate(tokens)])
        begun = set[int]()
        while len(begun) < count:
            self.rollout.step()
            begun.update(new.id for new in self.rollout.new_tokens())
        prefill = self._clock() - start
        decode = [self._step() for _ in range(DECODE_STEPS)]
        assert self.rollout.unfinished == count, "all of them were decoded in every step"
        entering = []
        for i in range(ENTERING):
            self.rollout.abort([i])  # new ids follow those of the first requests
            self.rollout.submit([Request(count + i, tuple(tokens[0]), limited(length), seed=i)])
            entering.append(self._step())
            self._step()  # of decoding alone, so that engines which schedule ahead are in the same state
        self.rollout.abort()
        # Medians: a step in which the process is interrupted says nothing about the engine.
        return median(decode), prefill / sum(map(len, tokens)), median(entering)

    def _step(self) -> float:
        """Seconds of an engine step."""
        start = self._clock()
        self.rollout.step()
        return self._clock() - start


def decode_points(taken: Mapping[int, Sequence[float]], before: Points) -> Points:
    """Median seconds of decode steps at the numbers of sequences of ``before``; where too few were taken, scaled from there.

    taken: seconds of steps by number of sequences, those within a tenth count.
    """
    nearby = {n: [s for at, seconds in taken.items() if 0.9 * n <= at <= 1.1 * n for s in seconds] for n, _ in before}
    known = {n: median(seconds) for n, seconds in nearby.items() if len(seconds) >= FEWEST}
    if not known:
        return before
    slower = median(known[n] / seconds for n, seconds in before if n in known)
    return tuple((n, known.get(n, slower * seconds)) for n, seconds in before)


def forced(request: SimulatedRequest, ids: Sequence[int], seed: int) -> Request:
    """A request whose response ends at its simulated length. ids: prompt and beginning of the response."""
    begins = len(ids) - request.begun
    sampling = limited(request.begun + request.left)
    return Request(request.id, tuple(ids[:begins]), sampling, seed, response_ids=tuple(ids[begins:]))


def limited(tokens: int) -> Sampling:
    """Sampling of a response of exactly ``tokens`` tokens."""
    return Sampling(1.0, -1, 1.0, tokens, stop_token_ids=(), ignore_eos=True)


def modes(
    run: Simulation, settings: Settings, begin: Callable[[], object] = lambda: None
) -> Iterator[tuple[str, dict[str, float]]]:
    """Figures of synchronous steps, then of partial ones, with one engine: building another takes longer than several steps.

    begin: called before the steps of which figures are taken.
    """
    begin()
    yield "synchronous", figures(run, settings.steps)
    run.sampler.policy = run.policies["partial"]
    for _ in range(settings.warm_up):
        run.step()
    begin()
    yield "partial", figures(run, settings.steps)


def figures(run: Simulation, steps: int) -> dict[str, float]:
    """Means of the next ``steps`` steps. seconds: of the engine. running: number of running sequences."""
    run.clock.seconds = run.clock.sequence_seconds = 0.0
    start, metrics = time.perf_counter(), list[dict[str, float]]()
    for _ in range(steps):
        batch = run.step()
        metrics.append(batch.meta["metrics"] | {"tokens": float(batch.meta["generated_tokens"])})
        print(f"{metrics[-1]['tokens']:.0f} tokens, {run.clock.seconds:.1f} s so far", file=sys.stderr, flush=True)
    names = ("rollout/stale_tokens", "rollout/recomputed_tokens", "rollout/age/mean")
    return {
        "seconds": run.clock.seconds / steps,
        "wall_seconds": (time.perf_counter() - start) / steps,
        "running": run.clock.sequence_seconds / run.clock.seconds,
        "tokens": mean(step["tokens"] for step in metrics),
    } | {name: mean(step[name] for step in metrics) for name in names if name in metrics[0]}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--engine", choices=ENGINES, default="embedded", help="(default: %(default)s)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="(default: %(default)s)")
    add("--shape", choices=SHAPES, default="0.5b", help="of the model (default: %(default)s)")
    add("--memory", type=float, default=0.7, help="fraction of the GPU for the engine (default: %(default)s)")
    sizes = {
        "prompts": 64,
        "n": 8,
        "prompt_tokens": 256,
        "max_tokens": 8192,
        "slots": 256,
        "max_age": 4,
        "steps": 4,
        "warm_up": 4,
    }
    for name, default in sizes.items():
        add(f"--{name}", type=int, default=default, help="see rollout_flow.py (default: %(default)s)")
    add("--oversubmit", type=float, default=1.5, help="(default: %(default)s)")
    add("--quick", action="store_true", help="sizes of seconds on a CPU")
    args = parser.parse_args(argv)
    if args.quick:
        args.shape, args.prompts, args.n, args.prompt_tokens, args.max_tokens, args.slots = "tiny", 4, 4, 8, 128, 8
        args.steps = args.warm_up = 1
    torch.set_num_threads(1)
    chosen = {name: value for name, value in vars(args).items() if name in sizes}
    settings = Settings(**chosen, oversubmit=args.oversubmit, replicas=1, train=0.0, a=0.0, b=0.0, c=0.0)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        torch.manual_seed(0)
        Qwen2ForCausalLM(Qwen2Config(**SHAPES[args.shape])).to(torch.bfloat16).save_pretrained(folder / "model")
        engine = (MeasuredEngine, args.engine, args.device, str(folder / "model"), args.memory)
        with LocalBackend() as backend:
            run = Simulation(settings, backend, folder, "one round", engine=engine)
            run.rollout.sync_weights(0)
            asked = role_call("rollout", MeasuredEngine.costs)
            (costs,) = run.clock.call(run.rollout.groups[0], "generate", "costs of the engine", asked)
            print(f"costs in seconds: {costs}", file=sys.stderr, flush=True)
            measured, decode = dict[str, dict[str, float]](), {"before": costs["decode"]}
            asked = role_call("rollout", MeasuredEngine.decode_steps, costs["decode"])

            def decode_steps() -> Points:
                (points,) = run.clock.call(run.rollout.groups[0], "generate", "decode steps", asked)
                return points

            for mode, found in modes(run, settings, decode_steps):
                measured[mode], decode[mode] = found, decode_steps()
        settings = replace(settings, **costs)
        simulated = dict[str, dict[str, float]]()
        for mode in measured:
            at_the_time = replace(settings, decode=decode[mode])
            with LocalBackend() as backend:
                simulated[mode] = dict(modes(Simulation(at_the_time, backend, folder, "one round"), at_the_time))[mode]
    both = {"measured": measured, "simulated": simulated}
    ratio = {name: of["synchronous"]["seconds"] / of["partial"]["seconds"] for name, of in both.items()}
    per_token = {name: ratio[name] * of["partial"]["tokens"] / of["synchronous"]["tokens"] for name, of in both.items()}
    setup = {"settings": asdict(settings), "decode": decode, "engine": args.engine, "device": args.device, "shape": args.shape}
    print(json.dumps(setup | both | {"ratio": ratio, "per_token": per_token, "load": os.getloadavg()}, indent=1))


if __name__ == "__main__":
    main()
