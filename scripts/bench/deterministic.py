"""Test whether runs are reproducible: run the quick start twice and compare metrics and all trained tensors bitwise.

python scripts/bench/deterministic.py --task data/sort_digits      # the data of scripts/quickstart.sh
python scripts/bench/deterministic.py --task data/sort_digits --bf16 trainer.device=cuda trainer.deterministic=true
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import load_file

from trainer.run.run_dir import EVENTS, read_lines, read_metrics

BY_THE_CLOCK = ("timing", "perf/")
BF16 = (
    "actor_rollout_ref.actor.fsdp_config.dtype=bfloat16", "actor_rollout_ref.ref.fsdp_config.dtype=bfloat16",
    "actor_rollout_ref.rollout.dtype=bfloat16", "critic.fsdp_config.dtype=bfloat16",
)  # fmt: skip


def run(task: Path, run_dir: Path, steps: int, overrides: Sequence[str]) -> None:
    command = [
        sys.executable, "-m", "trainer.main_ppo", "recipe=quickstart", "trainer.backend=local", "trainer.logger=[]",
        f"data.train_files={task}/train.parquet", f"data.val_files={task}/test.parquet",
        f"actor_rollout_ref.model.path={task}/warm", f"critic.model.path={task}/warm", f"trainer.total_training_steps={steps}",
        f"trainer.test_freq={steps}", f"trainer.save_freq={steps}", f"trainer.default_local_dir={run_dir}", *overrides,
    ]  # fmt: skip
    subprocess.run(command, check=True, stdout=sys.stderr)


def differences(a: Path, b: Path) -> list[str]:
    """The first differing step of each metric, and the tensors that differ."""
    found: dict[str, str] = {}
    for mine, other in zip(read_metrics(a), read_metrics(b), strict=True):
        for name in mine:
            if not name.startswith(BY_THE_CLOCK) and mine[name] != other[name]:
                found.setdefault(name, f"{name}: step {mine['training/global_step']:g}, {mine[name]!r} and {other[name]!r}")
    for path in sorted(a.rglob("*.safetensors")):
        mine, other = load_file(path), load_file(b / path.relative_to(a))
        for name, tensor in mine.items():
            if not (tensor == other[name]).all():
                found[name] = f"{path.parent.name} {name}"
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    args, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = [Path(folder) / name for name in ("first", "second")]
        for run_dir in runs:
            run(args.task, run_dir, args.steps, [*(BF16 if args.bf16 else ()), *overrides])
        differ = differences(*runs)
        steps = [step["timing_s/step"] for step in read_metrics(runs[1]) if "timing_s/step" in step]
        events = [event["text"] for event in read_lines(runs[0] / EVENTS)]
        print(json.dumps({"equal": not differ, "differ": len(differ), "such as": differ[:3], "events": events,
                          "seconds a step": round(statistics.median(steps), 4)}))  # fmt: skip


if __name__ == "__main__":
    main()
