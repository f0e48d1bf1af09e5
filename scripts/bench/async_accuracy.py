"""Held-out accuracy of asynchronous and synchronous training after as many steps: the quick start's task, by seed, as JSON.

    python scripts/bench/async_accuracy.py                        # all modes, seeds 41 42 43, 250 steps: an hour on two cores
    python scripts/bench/async_accuracy.py --modes async-1 --seeds 41
    python scripts/bench/async_accuracy.py --task worked --modes synchronous partial
    python scripts/bench/async_accuracy.py --modes async-4 --overrides algorithm.rollout_correction.rollout_is=sequence \
        algorithm.rollout_correction.bypass_mode=false

Each seed has its own model, warmed up as in scripts/quickstart.sh. Trainer and engine have a slot each in asynchronous runs. With
``--task worked`` a response shows how the digits are sorted, one swap after the other, and counts only as a whole: 7 to 105
tokens, so that of partial rollouts most tokens are stale; responses of the quick start end within a call of the engine.

accuracies: of the greedy responses after the last step, by seed. staleness, stale_tokens: mean over the steps after the first of
rollout/staleness/max and rollout/stale_tokens, by seed. standard_error: of one accuracy, from the number of held-out problems.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from itertools import islice
from math import sqrt
from pathlib import Path

from data_preprocess.writer import rl_row, sft_row, write
from scripts.bench.learning import learn, warm_up
from trainer.data.order import permutation
from trainer.run.run_dir import read_lines
from workers.seeding import seed_of

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
DIGITS, LONGEST = 6, 112
TASKS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "digits": ((), ()),
    "worked": (
        ("data.max_length=128", "trainer.total_training_steps=400"),
        (f"data.max_response_length={LONGEST}", "actor_rollout_ref.actor.optim.lr=1e-4"),
    ),
}
"""Overrides of the warm start and of each run."""


def mean_of(metric: str, run_dir: Path) -> float:
    """Mean over the steps after the first; 0 if the mode has no such metric."""
    found = [step.get(metric, 0.0) for step in read_lines(run_dir / "metrics.jsonl")]
    return statistics.mean(found[2:])  # the first line is the validation before training


def write_worked(folder: Path) -> None:
    """Files of the task ``worked``, as data_preprocess.sort_digits names them."""
    problems = (f"{number:0{DIGITS}d}" for number in permutation(10**DIGITS, seed_of(0, "worked")))
    for split, size in (("test", 512), ("train", 20_000)):
        rows = [
            rl_row(data_source="sort_digits", prompt=f"{d}=", ability="sort", ground_truth=worked(d), split=split, index=i)
            for i, d in enumerate(islice(problems, size))
        ]
        write(rows, str(folder), split)
    write([sft_row(f"{d}=", worked(d)) for d in islice(problems, 8192)], str(folder), "sft")


def worked(digits: str) -> str:
    """Rows of digits: in each the first two neighbours that are in wrong order are swapped."""
    rows = [digits]
    while at := next((i for i in range(1, len(digits)) if rows[-1][i - 1] > rows[-1][i]), 0):
        last = rows[-1]
        rows.append(last[: at - 1] + last[at] + last[at - 1] + last[at + 1 :])
    return "=".join(rows[1:] or rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=list(TASKS), default="digits", help="(default: %(default)s)")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--steps", type=int, default=STEPS, help="(default: %(default)s)")
    parser.add_argument("--problems", type=int, default=512, help="held-out problems (default: %(default)s)")
    parser.add_argument("--overrides", nargs="+", default=[], help="of every mode")
    arguments = parser.parse_args(argv)
    report: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as folder:
        sft, more = TASKS[arguments.task]
        if arguments.task == "worked":
            with redirect_stdout(sys.stderr):
                write_worked(Path(folder))
        warm = {seed: warm_up(Path(folder), seed, sft=sft) for seed in arguments.seeds}
        for mode in arguments.modes:
            curves, ages, stale = {}, {}, {}
            for seed, model in warm.items():
                run_dir = Path(folder) / f"{mode}-{seed}"
                options = (*MODES[mode], *more, f"trainer.test_freq={max(1, arguments.steps // 5)}", *arguments.overrides)
                curves[seed] = learn(model, run_dir, seed, options, arguments.steps)
                ages[seed], stale[seed] = (mean_of(f"rollout/{name}", run_dir) for name in ("staleness/max", "stale_tokens"))
                print(f"{mode}, seed {seed}: {curves[seed]}, staleness {ages[seed]:.2f}", file=sys.stderr, flush=True)
            last = {seed: curve[-1][1] for seed, curve in curves.items()}
            median = statistics.median(last.values())
            report[mode] = {
                "accuracies": last,
                "median": median,
                "standard_error": sqrt(median * (1 - median) / arguments.problems),
                "staleness": ages,
                "stale_tokens": stale,
                "curves": curves,
            }
    print(json.dumps({"steps": arguments.steps, "modes": report}, indent=1))


if __name__ == "__main__":
    main()
