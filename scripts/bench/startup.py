"""How long a run takes to check its configuration, and to its first generation and the end of its first step, part by part.

    python scripts/bench/startup.py                    # a table on stderr, JSON on stdout
    python scripts/bench/startup.py --rounds 1 trainer.backend=local          # further arguments are overrides
    python scripts/bench/startup.py --model DIR --rounds 1 rollout=vllm ...   # a model with a tokenizer, instead of a tiny one
    python scripts/bench/startup.py --quick            # a smoke version: one round, in this backend

check: `python -m trainer.main_ppo recipe=quickstart trainer.dry_run=config`, a process from its start to its end. first step:
the quick start (data/sort_digits of the usual sizes, a model with random weights), a process from its start to its end; the parts
until the first generation are in the run's logs/start.json, then come validation and a step, and the end of all processes.
Seconds; medians over rounds, after each other. CPU: of the process and its children.
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
    parser.add_argument("--model", help="a directory (default: a tiny model with random weights)")
    parser.add_argument("--quick", action="store_true", help="one round in this process's backend, little data")
    args, overrides = parser.parse_known_args()
    sizes = []
    if args.quick:
        args.rounds, overrides = 1, ["trainer.backend=local", *overrides]
        sizes = ["--train_size=256", "--test_size=16", "--sft_size=16", "--preferences_size=16", "--preferences_test_size=16"]
    checks, steps = [], []
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or f"{folder}/model"
        with mock.patch("builtins.print"):
            sort_digits.main([f"--local_save_dir={folder}", *sizes])
            if args.model is None:
                tiny_model.main([f"--save_dir={model}"])
        words = [
            "recipe=quickstart", f"data.train_files={folder}/train.parquet", f"data.val_files={folder}/test.parquet",
            f"actor_rollout_ref.model.path={model}", f"critic.model.path={model}",
            "trainer.total_training_steps=1", "trainer.logger=[]", *overrides,
        ]  # fmt: skip
        for number in range(args.rounds):
            checks.append(check(words))
            steps.append(first_step(words, Path(folder) / f"run_{number}"))
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


def first_step(words: list[str], run_dir: Path) -> dict[str, float]:
    """Seconds to the end of the process, and of each part; ``ranks/<part>``: of the slowest one, within the others."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-m", "trainer.main_ppo", *words, f"trainer.default_local_dir={run_dir}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    total = time.perf_counter() - started
    *_, metrics = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    parts: dict[str, float] = json.loads((run_dir / "logs/start.json").read_text())
    first, step = parts.pop("total"), metrics["timing_s/step"]
    rest = {"first generation": first, "step": step, "validation and end": total - first - step}
    return {"total": total, **rest, **parts, "cpu": cpu_since(before)}


def cpu_since(before: resource.struct_rusage) -> float:
    """Of children that have ended, and theirs; Ray's daemons end with the run."""
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    return now.ru_utime + now.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
