"""Trained tokens per second of asynchronous, partial and synchronous training on the same GPUs, as JSON on stdout.

    python scripts/bench/async_speed.py --out DIR --gpus 2     # 1.5B, responses of 2k tokens on average, an hour
    python scripts/bench/async_speed.py --out DIR --gpus 4 --shape 7b --modes synchronous async-2
    python scripts/bench/async_speed.py --out DIR --quick      # tiny models on the CPU, a minute

Each mode is a run of trainer.main_ppo on random weights. Lengths are geometric: the model writes each token with nearly the same
probability, and vocabulary / mean_tokens of the tokens end a response. Synchronous and partial runs have trainer and engines on
all GPUs, asynchronous ones on an equal share each. A mode that fails is reported as such; DIR/<mode>.log has its output.

tokens_per_second: of responses that were trained on, over the steps after the warm-up; runs that generate ahead have one step
more, during which nothing is generated. speedup: over the first mode. seconds: medians of these steps by phase.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scripts.bench.async_accuracy import CORRECTED
from scripts.gpu.driver import MARK, ended
from scripts.gpu.make import make_data, make_model
from trainer.run.run_dir import read_metrics

AHEAD = (*CORRECTED, "placement=split", "async_training.mode=async")
MODES: dict[str, tuple[str, ...]] = {
    "synchronous": CORRECTED,
    "partial": (*CORRECTED, "async_training.mode=partial"),
    **{f"async-{bound}": (*AHEAD, f"async_training.max_staleness={bound}") for bound in (1, 2, 4)},
}
PROMPT = 512
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
METRICS = (
    "rollout/staleness/mean", "rollout/staleness/max", "rollout/stale_tokens", "rollout/recomputed_tokens", "perf/rollout_idle",
    "perf/trainer_idle", "training/rollout_log_probs_diff_mean", "perf/mfu/actor", "response_length/mean", "response_length/max",
)  # fmt: skip


def geometric_model(folder: Path, shape: str, mean_tokens: int) -> Path:
    """A model with random weights whose responses have ``mean_tokens`` tokens on average."""
    path = folder / f"{shape}-{mean_tokens}"
    if not path.exists():
        make_model(folder / shape, shape)
        vocabulary = json.loads((folder / shape / "config.json").read_text())["vocab_size"]
        ends = [1, *range(vocabulary - 1, vocabulary - max(1, round(vocabulary / mean_tokens)), -1)]
        (folder / shape / "generation_config.json").write_text(json.dumps({"eos_token_id": ends, "pad_token_id": 0}))
        (folder / shape).rename(path)
    return path


def overrides(args: argparse.Namespace, model: Path) -> Iterator[str]:
    """Overrides of every mode."""
    data, longest = model.parent / "data", PROMPT + args.max_tokens
    yield from (f"data.train_files=['{data}/prompts.parquet']", f"data.val_files=['{data}/prompts.parquet']")
    yield from (f"reward.custom_reward_function.path={data}/reward.py", "reward.num_workers=2")
    yield from (f"actor_rollout_ref.model.path={model}", f"trainer.n_gpus_per_node={args.gpus}", "algorithm=grpo")
    yield from (f"data.train_batch_size={args.prompts}", f"{ACTOR}.ppo_mini_batch_size={args.prompts}", f"{ROLLOUT}.n={args.n}")
    yield from (f"data.max_prompt_length={PROMPT}", f"data.max_response_length={args.max_tokens}")
    yield from (f"{ACTOR}.use_kl_loss=false", f"{ACTOR}.ppo_max_token_len_per_gpu={2 * longest if args.quick else longest}")
    yield from (f"{ROLLOUT}.max_num_seqs={args.slots}", f"{ROLLOUT}.tensor_model_parallel_size=1")
    yield from ("trainer.logger=[]", "trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=-1")
    if args.quick:
        yield from ("trainer.device=cpu", "trainer.backend=ray", f"{ROLLOUT}.name=embedded", f"{ROLLOUT}.dtype=float32")
        yield from (f"{ACTOR}.fsdp_config.model_dtype=float32", f"{ACTOR}.fsdp_config.dtype=float32")
    else:
        yield f"{ROLLOUT}.name={args.engine}"


def measure(mode: str, args: argparse.Namespace, model: Path) -> dict[str, Any]:
    """Run a mode and summarize its steps."""
    run_dir, log = args.out / mode, args.out / f"{mode}.log"
    memory = args.memory_apart if "async" in mode else args.memory
    steps = args.warm_up + args.steps + (mode != "synchronous")
    command = [
        sys.executable, "-m", "trainer.main_ppo", *overrides(args, model), *MODES[mode], f"trainer.default_local_dir={run_dir}",
        f"trainer.total_training_steps={steps}", f"{ROLLOUT}.gpu_memory_utilization={memory}", *args.overrides,
    ]  # fmt: skip
    with log.open("w") as output, ended(str(log)):
        try:
            subprocess.run(
                command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, timeout=args.limit, check=True,
                env=os.environ | {MARK: str(log)},
            )  # fmt: skip
            failed = None
        except subprocess.CalledProcessError as error:
            failed = f"exit code {error.returncode}: {log.read_text(errors='replace').strip().splitlines()[-1]}"
        except subprocess.TimeoutExpired:
            failed = f"not done after {args.limit:.0f} s"
    lines = read_metrics(run_dir) if (run_dir / "metrics.jsonl").exists() else []
    measured = lines[args.warm_up : args.warm_up + args.steps]
    return summary(measured, args.prompts * args.n) | ({"failed": failed} if failed else {})


def summary(steps: Sequence[dict[str, float]], responses: int) -> dict[str, Any]:
    """steps: metrics by step. responses: per step. Empty without steps."""
    if not steps:
        return {}
    seconds = sum(step["timing_s/step"] for step in steps)
    tokens = sum(step["response_length/mean"] * responses for step in steps)
    timings = sorted({name for step in steps for name in step if name.startswith("timing_s/")})
    return {
        "steps": len(steps),
        "steps_per_hour": 3600 * len(steps) / seconds,
        "tokens_per_second": tokens / seconds,
        "seconds": {
            name.removeprefix("timing_s/"): statistics.median(step[name] for step in steps if name in step) for name in timings
        },
        "metrics": {name: statistics.mean(step[name] for step in steps if name in step) for name in METRICS if name in steps[-1]},
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="models, run directories and logs")
    add("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    add("--shape", default="1.5b", help="of scripts/bench/shapes.py (default: %(default)s)")
    add("--engine", default="vllm", help="(default: %(default)s)")
    sizes = {"gpus": 2, "prompts": 32, "n": 8, "mean_tokens": 2048, "max_tokens": 16384, "slots": 512, "steps": 4, "warm_up": 2}
    for name, default in sizes.items():
        add(f"--{name}", type=int, default=default, help="(default: %(default)s)")
    add("--memory", type=float, default=0.5, help="engine's fraction of a GPU that it shares (default: %(default)s)")
    add("--memory_apart", type=float, default=0.85, help="engine's fraction of a GPU of its own (default: %(default)s)")
    add("--limit", type=float, default=3600.0, help="seconds for a mode (default: %(default)s)")
    add("--overrides", nargs="+", default=[], help="of every mode")
    add("--quick", action="store_true", help="tiny sizes on the CPU")
    args = parser.parse_args(argv)
    if args.quick:
        args.shape, args.prompts, args.n, args.mean_tokens, args.max_tokens, args.steps, args.warm_up = "tiny", 4, 2, 8, 64, 2, 1
        args.memory = args.memory_apart = 0.05
    args.out.mkdir(parents=True, exist_ok=True)
    make_data(args.out / "data")
    model = geometric_model(args.out, args.shape, args.mean_tokens)
    report: dict[str, dict[str, Any]] = {}
    for mode in args.modes:
        report[mode] = found = measure(mode, args, model)
        rates = [one.get("tokens_per_second") for one in (found, report[args.modes[0]])]
        if all(rates):
            found["speedup"] = rates[0] / rates[1]
        print(f"{mode}: {json.dumps(found)}", file=sys.stderr, flush=True)
    print(json.dumps({"settings": {k: str(v) for k, v in vars(args).items()}, "modes": report}, indent=1))


if __name__ == "__main__":
    main()
