"""How long a run takes to check its configuration, and to the end of its first step, part by part, beside each other in rounds.

    python scripts/bench/startup.py                    # a table on stderr, JSON on stdout
    python scripts/bench/startup.py --rounds 1 trainer.backend=local          # further arguments are overrides
    python scripts/bench/startup.py --quick            # a smoke version: one round, in this backend

check: `python -m trainer.main_ppo recipe=quickstart trainer.dry_run=config`, a process from its start to its end. first step:
the quick start (data/sort_digits of the usual sizes, a model with random weights), from the start of the process to the end of
step 1, Ray and the validation before training among it. Seconds; medians over rounds. CPU: of the process and its children.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

from data_preprocess import sort_digits, tiny_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="one round in this process's backend, little data")
    args, overrides = parser.parse_known_args()
    sizes = []
    if args.quick:
        args.rounds, overrides = 1, ["trainer.backend=local", *overrides]
        sizes = ["--train_size=256", "--test_size=16", "--sft_size=16", "--preferences_size=16", "--preferences_test_size=16"]
    checks, steps = [], []
    with tempfile.TemporaryDirectory() as folder:
        with mock.patch("builtins.print"):
            sort_digits.main([f"--local_save_dir={folder}", *sizes])
            tiny_model.main([f"--save_dir={folder}/model"])
        words = [
            "recipe=quickstart", f"data.train_files={folder}/train.parquet", f"data.val_files={folder}/test.parquet",
            f"actor_rollout_ref.model.path={folder}/model", f"critic.model.path={folder}/model",
            "trainer.total_training_steps=1", "trainer.logger=[]", *overrides,
        ]  # fmt: skip
        for number in range(args.rounds):
            checks.append(check(words))
            steps.append(first_step([*words, f"trainer.default_local_dir={folder}/run_{number}"], Path(folder)))
    said = {
        "check": {name: statistics.median(one[name] for one in checks) for name in checks[0]},
        "first_step": {name: statistics.median(one[name] for one in steps) for name in steps[0]},
    }
    for name, parts in said.items():
        print(f"{name:10}", ", ".join(f"{part} {spent:.2f}" for part, spent in parts.items()), file=sys.stderr)
    settings = vars(args) | {"overrides": overrides}
    print(json.dumps({"settings": settings, **said, "rounds": {"check": checks, "first_step": steps}, "load": os.getloadavg()}))


def check(words: list[str]) -> dict[str, float]:
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-m", "trainer.main_ppo", *words, "trainer.dry_run=config"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return {"total": time.perf_counter() - started, "cpu": cpu_since(before)}


def first_step(words: list[str], folder: Path) -> dict[str, float]:
    """Seconds of each part, by its end, and in all."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
    command = [sys.executable, "-m", "scripts.bench.startup_parts", str(folder / "marks"), *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    ends: dict[str, float] = json.loads((folder / "marks").read_text())
    starts = [started, *list(ends.values())[:-1]]
    parts = {name: end - start for (name, end), start in zip(ends.items(), starts, strict=True)}
    return {"total": ends["first step"] - started, **parts, "cpu": cpu_since(before)}


def cpu_since(before: resource.struct_rusage) -> float:
    """Of children that have ended, and theirs; Ray's daemons end with the run."""
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    return now.ru_utime + now.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
