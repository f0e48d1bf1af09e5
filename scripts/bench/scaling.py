"""How many times as fast more workers are, each with one thread, as JSON: whole GRPO steps of step.py, in turns.

    python scripts/bench/scaling.py                                    # one worker and two, 3.4M parameters
    python scripts/bench/scaling.py --workers 2 --steps 3 --hidden_size 512     # what is not known here goes to step.py

The first number of workers is what the others are compared with. Medians over the rounds, of each round's medians over its steps.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from typing import Any

from scripts.bench.suite import said_in


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="(default: %(default)s)")
    args, words = parser.parse_known_args()
    rounds = [{workers: step(workers, words) for workers in args.workers} for _ in range(args.rounds)]
    found = {str(workers): compared([said[workers] for said in rounds], [said[args.workers[0]] for said in rounds])
             for workers in args.workers}  # fmt: skip
    for workers, told in found.items():
        print(
            f"{workers} workers: {told['seconds']:.2f} s a step, {told['times_as_fast']:.2f} x; {told['phases']}", file=sys.stderr
        )
    settings = vars(args) | {"step": words}
    print(json.dumps({"settings": settings, "workers": found, "rounds": rounds, "load": os.getloadavg()}, indent=1))


def step(workers: int, words: list[str]) -> dict[str, float]:
    """Median seconds of a step, whole and by phase."""
    command = [sys.executable, "-m", "scripts.bench.step", *words, f"trainer.n_gpus_per_node={workers}"]
    threads = os.environ | {"OMP_NUM_THREADS": "1"}
    return said_in(subprocess.run(command, check=True, stdout=subprocess.PIPE, env=threads, text=True).stdout)["seconds"]


def compared(these: list[dict[str, float]], first: list[dict[str, float]]) -> dict[str, Any]:
    return {
        "seconds": statistics.median(one["step"] for one in these),
        "times_as_fast": statistics.median(other["step"] / one["step"] for one, other in zip(these, first, strict=True)),
        "phases": {name: round(statistics.median(one[name] for one in these), 3) for name in these[0]},
    }


if __name__ == "__main__":
    main()
