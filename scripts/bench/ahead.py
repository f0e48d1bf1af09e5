"""Measured steps per hour of training with batches that are generated ahead, and what the simulated scheduler predicts.

    python scripts/bench/ahead.py                  # JSON on stdout, three minutes, which are spent asleep
    python scripts/bench/ahead.py --train 3

Sampler, policies, buffer, flow, thread and clock are the trainer's; the engine is that of rollout_flow.py and sleeps for as long
as its calls take in simulated time, and an update sleeps for ``train`` seconds. The prediction runs the same policies without
sleeping, in simulated time: a synchronous step takes generation and update, one with generation ahead the longer of both. The
controller's own work is in the measurement alone; use longer times (a, b, c, train) on a machine that is not idle.

modes: max_staleness 0 is synchronous, 1 is one_step_off, which is async with the same bound. ratio: measured over predicted steps
per hour. speedup: measured steps per hour over those of the synchronous mode.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from scripts.bench.rollout_flow import Settings, SimulatedEngine, Simulation
from trainer.rollout.ahead import RolloutsAhead
from trainer.run.timing import Phases
from workers.batch import Batch
from workers.controller.local_backend import LocalBackend
from workers.rollout.base import Sampling

BOUNDS = (0, 1, 2, 4)


class SleepingEngine(SimulatedEngine):
    """An engine whose calls take their simulated time."""

    def advance(self, prompts: Batch | None, sampling: Sampling, steps: int) -> Batch:
        start = time.perf_counter()
        responses = super().advance(prompts, sampling, steps)
        time.sleep(max(0.0, start + responses.meta["seconds"] - time.perf_counter()))
        return responses


def step(run: Simulation, train: Callable[[], object]) -> tuple[float, float]:
    """Run a step as the loop does. Returns simulated seconds: those of waiting for its batch, those that ``train`` overlaps."""
    begin = run.clock.seconds
    run.step()
    waited = run.clock.seconds
    policy = run.sampler.policy
    if isinstance(policy, RolloutsAhead):
        with policy.generating(run.sampler, run.n_steps + 1, run.stream, Phases(), {}):
            train()
    else:
        train()
    return waited - begin, run.clock.seconds - waited


def seconds_per_step(settings: Settings, engine: type[SimulatedEngine]) -> float:
    """Of the steps after the warm-up: wall time with engines that sleep, else simulated time."""
    sleeps = engine is SleepingEngine
    seconds = 0.0
    with LocalBackend() as backend, tempfile.TemporaryDirectory() as folder:
        mode = "ahead" if settings.max_staleness else "one round"
        run = Simulation(settings, backend, Path(folder), mode, engine=(engine,))
        for number in range(settings.warm_up + settings.steps):
            start = time.perf_counter()
            waited, overlapped = step(run, lambda: time.sleep(settings.train if sleeps else 0.0))
            took = time.perf_counter() - start if sleeps else waited + max(overlapped, settings.train)
            seconds += took * (number >= settings.warm_up)
    return seconds / settings.steps


def compare(settings: Settings) -> dict[str, float]:
    """Steps per hour, measured and predicted, of a mode."""
    measured, predicted = (3600 / seconds_per_step(settings, engine) for engine in (SleepingEngine, SimulatedEngine))
    return {"measured": measured, "predicted": predicted, "ratio": measured / predicted}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    sizes = {"prompts": 16, "n": 8, "prompt_tokens": 64, "max_tokens": 512, "slots": 64, "steps": 8, "warm_up": 4}
    for name, default in sizes.items():
        add(f"--{name}", type=int, default=default, help="see rollout_flow.py (default: %(default)s)")
    seconds = {"oversubmit": 1.5, "a": 1e-2, "b": 4e-5, "c": 4e-6, "d": 0.0, "train": 2.0}
    for name, value in seconds.items():
        add(f"--{name}", type=float, default=value, help="see rollout_flow.py (default: %(default)s)")
    add("--bounds", type=int, nargs="+", default=BOUNDS, help="max_staleness (default: %(default)s)")
    args = vars(parser.parse_args(argv))
    bounds = args.pop("bounds")
    settings = Settings(**args, replicas=1, max_age=0)
    torch.set_num_threads(1)
    modes = dict[str, dict[str, float]]()
    for bound in bounds:
        modes[str(bound)] = found = compare(replace(settings, max_staleness=bound))
        found["speedup"] = found["measured"] / modes[str(bounds[0])]["measured"]
        words = "max_staleness {}: {measured:.0f} steps per hour, predicted {predicted:.0f}, ratio {ratio:.3f}"
        print(words.format(bound, **found), file=sys.stderr, flush=True)
    print(json.dumps({"settings": asdict(settings), "modes": modes, "load": os.getloadavg()}, indent=1))


if __name__ == "__main__":
    main()
