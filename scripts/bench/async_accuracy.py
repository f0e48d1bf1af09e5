"""Held-out accuracy of asynchronous and synchronous training after as many steps: the quick start's task, by seed, as JSON.

    python scripts/bench/async_accuracy.py                        # all modes, seeds 41 42 43, 250 steps: an hour on two cores
    python scripts/bench/async_accuracy.py --modes async-1 --seeds 41
    python scripts/bench/async_accuracy.py --modes async-4 --overrides algorithm.rollout_correction.rollout_is=sequence \
        algorithm.rollout_correction.bypass_mode=false

Each seed has its own model, warmed up as in scripts/quickstart.sh. Trainer and engine have a slot each in asynchronous runs.

accuracies: of the greedy responses after the last step, by seed. staleness: mean over the steps after the first of
rollout/staleness/max, by seed. standard_error: of one accuracy, from the number of held-out problems.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from math import sqrt
from pathlib import Path

from scripts.bench.learning import learn, warm_up
from trainer.run.run_dir import read_lines

STEPS, SEEDS = 250, (41, 42, 43)
CORRECTED = ("algorithm.rollout_correction.rollout_is=token",)
# A step of the quick start is one update: only the ratio to the policy that sampled has a trust region.
BYPASS = ("algorithm.rollout_correction.bypass_mode=true",)
AHEAD = (*BYPASS, "placement=split", "trainer.backend=ray", "trainer.n_gpus_per_node=2", "async_training.mode=async")
MODES: dict[str, tuple[str, ...]] = {
    "synchronous": (),
    "partial": (*CORRECTED, "async_training.mode=partial"),
    "async-1": (*AHEAD, "async_training.max_staleness=1"),
    # Responses end within a tick, so nothing waits: the age of tokens comes from the steps between two syncs.
    "async-4": (*AHEAD, "async_training.max_staleness=4", "async_training.trigger_parameter_sync_step=4"),
}


def staleness(run_dir: Path) -> float:
    """Mean over the steps after the first; 0 if the mode has no such metric."""
    found = [step.get("rollout/staleness/max", 0.0) for step in read_lines(run_dir / "metrics.jsonl")]
    return statistics.mean(found[2:])  # the first line is the validation before training


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--steps", type=int, default=STEPS, help="(default: %(default)s)")
    parser.add_argument("--problems", type=int, default=512, help="held-out problems (default: %(default)s)")
    parser.add_argument("--overrides", nargs="+", default=[], help="of every mode")
    arguments = parser.parse_args(argv)
    report: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as folder:
        warm = {seed: warm_up(Path(folder), seed) for seed in arguments.seeds}
        for mode in arguments.modes:
            curves, stale = {}, {}
            for seed, model in warm.items():
                run_dir = Path(folder) / f"{mode}-{seed}"
                options = (*MODES[mode], f"trainer.test_freq={max(1, arguments.steps // 5)}", *arguments.overrides)
                curves[seed] = learn(model, run_dir, seed, options, arguments.steps)
                stale[seed] = staleness(run_dir)
                print(f"{mode}, seed {seed}: {curves[seed]}, staleness {stale[seed]:.2f}", file=sys.stderr, flush=True)
            last = {seed: curve[-1][1] for seed, curve in curves.items()}
            median = statistics.median(last.values())
            report[mode] = {
                "accuracies": last,
                "median": median,
                "standard_error": sqrt(median * (1 - median) / arguments.problems),
                "staleness": stale,
                "curves": curves,
            }
    print(json.dumps({"steps": arguments.steps, "modes": report}, indent=1))


if __name__ == "__main__":
    main()
