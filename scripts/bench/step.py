"""Seconds of whole GRPO or PPO steps, wall and CPU, tokens per second, and where the time goes: a table, and JSON.

    python scripts/bench/step.py                       # 32 prompts x 8 responses x (17 + 60) tokens, 3.4M parameters, KL loss
    python scripts/bench/step.py --task ragged         # responses of 1 to 512 tokens, 128 on average
    python scripts/bench/step.py --task quickstart trainer.backend=local
    python scripts/bench/step.py --algorithm ppo --kl_coef 0 --steps 3 algorithm.use_kl_in_reward=true

Runs trainer.main_ppo (launch.py) on a model with random weights and prompts of random digits. Every response has a fixed number
of tokens, whatever is sampled. A step lasts from the end of the step before to its own, logging included; the first ones are left
out (--warmup). CPU seconds are those of the controller, its workers and scorers, without Ray's daemons, as the system counts
them. Further arguments are overrides.
"""

import argparse
import json
import math
import os
import statistics
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import transformers
import yaml
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from data_preprocess import tiny_model
from data_preprocess.writer import rl_row, write
from trainer import __version__
from trainer.run.timing import WITHIN

ROOT = Path(__file__).parents[2]
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(map(ord, solution_str)) % 7 / 7
"""
WORK = ("gen", "old_log_prob", "ref", "values", "update_critic", "update_actor")
PARTS = ("step", *WITHIN)  # the whole, and parts of other phases
ENGINE_MOVES = ("sync", "engine_sleep", "engine_wake", "release_memory")
"""What colocation costs a step, at most: the sync has the wake of the weights in it. Garbage collection is in the sleep."""
DAEMONS = ("raylet", "gcs_server", "/ray/_private/", "/ray/dashboard/", "ray::IDLE")
POLL_SECONDS = 0.001


@dataclass(kw_only=True)
class Workload:
    """Sizes and settings of a step.

    response_length: tokens of every response, or with ``ragged`` of the longest: lengths are then drawn from a geometric
    distribution whose mean is about a quarter of it. kl_coef 0: no KL loss. vocab: size of the vocabulary. model: a model's
    directory, which replaces these sizes. device: on cuda everything is in bfloat16, activations are recomputed, vLLM generates.
    """

    algorithm: str = "grpo"
    prompts: int = 32
    n: int = 8
    prompt_length: int = 17
    response_length: int = 60
    ragged: bool = False
    hidden_size: int = 256
    num_hidden_layers: int = 4
    intermediate_size: int = 768
    vocab: int = 460
    tie_word_embeddings: bool = False
    lr: float = 1e-6
    kl_coef: float = 0.001
    steps: int = 5
    warmup: int = 1
    threads: int = 1
    model: str = ""
    device: str = "cpu"


QUICKSTART: dict[str, Any] = {"prompt_length": 7, "response_length": 7, "hidden_size": 96, "num_hidden_layers": 2,
                              "intermediate_size": 288, "vocab": 64, "tie_word_embeddings": True, "lr": 3e-4, "kl_coef": 0.0,
                              "steps": 40, "warmup": 5}  # fmt: skip
TASKS: dict[str, dict[str, Any]] = {
    "step": {},
    "ragged": {"response_length": 512, "ragged": True, "steps": 2},
    "quickstart": QUICKSTART,
}
QUICK: dict[str, Any] = {"prompts": 4, "n": 2, "response_length": 8, "hidden_size": 32, "num_hidden_layers": 1, "steps": 2}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_workload(parser)
    parser.add_argument("--alone", action="store_true", help="then the same batches by vLLM without Tandem: alone.py")
    args, overrides = parser.parse_known_args(argv)
    work = workload(args)
    with tempfile.TemporaryDirectory() as folder:
        task = make_task(work, Path(folder), seed=0)
        report = run_tandem(work, task, Path(folder) / "run", overrides)
        alone = engine_alone(Path(folder)) if args.alone else None
    print(table({"tandem": report}), file=sys.stderr)
    print(json.dumps(summary(work, overrides, report) | {"alone": alone}, indent=1))


def engine_alone(folder: Path) -> dict[str, Any]:
    """Report of alone.py on the task in ``folder``; its error instead if it fails, so that the step's figures are kept."""
    output = folder / "alone.json"
    command = [sys.executable, "-m", "scripts.bench.alone", str(folder / "task.json"), str(output)]
    code = subprocess.run(command, cwd=ROOT, stdout=2, check=False).returncode
    found: dict[str, Any] = json.loads(output.read_text()) if code == 0 else {"error": f"exit code {code}", "best": math.nan}
    return found


def add_workload(parser: argparse.ArgumentParser) -> None:
    """Add options for the task and for each field of Workload."""
    parser.add_argument("--task", choices=TASKS, default="step", help="(default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a smoke version of the task, seconds")
    for field in fields(Workload):
        kind = type(field.default)
        action = {"action": argparse.BooleanOptionalAction} if kind is bool else {"type": kind}
        parser.add_argument(f"--{field.name}", default=None, help="(default: the task's)", **action)


def workload(args: argparse.Namespace) -> Workload:
    typed = {field.name: vars(args)[field.name] for field in fields(Workload)}
    work = Workload(**TASKS[args.task] | (QUICK if args.quick else {}) | {k: v for k, v in typed.items() if v is not None})
    if work.warmup < 1:
        raise SystemExit(f"--warmup {work.warmup}: a step is measured from the end of one before it: at least 1")
    return work


def make_task(work: Workload, folder: Path, seed: int) -> dict[str, Any]:
    """Write model, prompts, reward and forced lengths to ``folder``, and task.json, which describes them to a rival's driver.

    A run has warmup + steps steps, and the file exactly their prompts, in order. lengths: a file with a list of the tokens of
    each response of the run, prompts * n per step; null if all have response_length.
    """
    model = Path(work.model) if work.model else random_model(work, folder / "model", seed)
    rng, steps = np.random.default_rng(seed), work.warmup + work.steps
    digits = rng.integers(0, 10, (work.prompts * steps, work.prompt_length))
    rows = [
        rl_row(data_source="bench", prompt="".join(map(str, line)), ability="", ground_truth="", split="train", index=i)
        for i, line in enumerate(digits.tolist())
    ]
    with redirect_stdout(sys.stderr):
        write(rows, str(folder), "train")
    (folder / "reward.py").write_text(REWARD)
    lengths = None
    if work.ragged:
        lengths = folder / "lengths.json"
        drawn = rng.geometric(4 / work.response_length, work.prompts * work.n * steps).clip(1, work.response_length)
        lengths.write_text(json.dumps(drawn.tolist()))
    shared = ("prompts", "n", "prompt_length", "response_length", "lr", "kl_coef", "steps", "warmup", "threads", "device")
    files = {"model": model, "train": folder / "train.parquet", "reward": folder / "reward.py", "lengths": lengths}
    task = {name: path and str(path) for name, path in files.items()} | {name: asdict(work)[name] for name in shared}
    task |= {"ignore_eos": True}
    (folder / "task.json").write_text(json.dumps(task, indent=1))
    return task


def random_model(work: Workload, folder: Path, seed: int) -> Path:
    logging.disable_progress_bar()
    alphabet = "--bytes" if work.vocab >= 258 else f"--alphabet={string.printable[: work.vocab - 2]}"
    sizes = [f"--{name}={asdict(work)[name]}" for name in ("hidden_size", "num_hidden_layers", "intermediate_size")]
    tied = "--tie_word_embeddings" if work.tie_word_embeddings else "--no-tie_word_embeddings"
    with redirect_stdout(sys.stderr):
        tiny_model.main([f"--save_dir={folder}", alphabet, tied, f"--seed={seed}", *sizes])
        model = AutoModelForCausalLM.from_pretrained(folder)
        model.resize_token_embeddings(work.vocab, mean_resizing=False)
        model.save_pretrained(folder)
    return folder


def run_tandem(work: Workload, task: dict[str, Any], run_dir: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Report of one run, in the format of a rival's driver: see compare.py."""
    folder = Path(task["train"]).parent
    environment = {"OMP_NUM_THREADS": str(work.threads), "BENCH_TASK": str(folder)}
    command = [sys.executable, "-m", "scripts.bench.launch", *arguments(work, task, run_dir), *overrides]
    began = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | environment, stdout=2)  # stdout is for the report alone
    try:
        ends, used = follow(process, run_dir / "metrics.jsonl")
    finally:
        process.terminate()
        process.wait()
    if process.returncode:
        raise SystemExit(f"the run ended with {process.returncode}: {run_dir}")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    config = yaml.safe_load((run_dir / "config.yaml").read_text())["actor_rollout_ref"]
    actor, rows = config["actor"], work.prompts * work.n
    dtypes = {actor["fsdp_config"]["dtype"], config["ref"]["fsdp_config"]["dtype"], config["rollout"]["dtype"]}
    updates = actor["ppo_epochs"] * -(-work.prompts // actor["ppo_mini_batch_size"])
    times = zip(lines[1:], np.diff(ends).tolist(), np.diff(used).tolist(), strict=True)
    steps = [measured(line, rows, updates, wall, cpu) for line, wall, cpu in times]
    return {
        "rival": "tandem",
        "version": __version__,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "dtype": " and ".join(sorted(dtypes)),
        "threads": int((folder / "threads_0").read_text()),
        "steps": steps[work.warmup - 1 :],
        "startup_s": ends[0] - began - lines[0]["timing_s/step"],
        "mfu": [line["perf/mfu"] for line in lines[work.warmup :] if "perf/mfu" in line],
    }


def arguments(work: Workload, task: dict[str, Any], run_dir: Path) -> list[str]:
    """Overrides of trainer.main_ppo for the task."""
    actor, longest = "actor_rollout_ref.actor", work.prompt_length + work.response_length
    cuda = work.device == "cuda"
    dtype, tokens = ("bfloat16", 16_384) if cuda else ("float32", 4096)
    roles = {"actor_rollout_ref.actor": "actor_rollout_ref", "actor_rollout_ref.ref": "actor_rollout_ref", "critic": "critic"}
    types = [f"{role}.fsdp_config.{key}" for role in roles for key in (f"dtype={dtype}", f"model_dtype={dtype}")]
    recomputed = [f"{model}.model.enable_gradient_checkpointing={str(cuda).lower()}" for model in dict.fromkeys(roles.values())]
    engine = ["rollout=vllm", "actor_rollout_ref.rollout.tensor_model_parallel_size=1"] if cuda else []
    return [
        f"algorithm={work.algorithm}", *engine, f"data.train_files={task['train']}", f"data.val_files={task['train']}",
        f"data.train_batch_size={work.prompts}", f"data.max_prompt_length={work.prompt_length}",
        f"data.max_response_length={work.response_length}", "data.shuffle=false",
        f"actor_rollout_ref.model.path={task['model']}", f"critic.model.path={task['model']}",
        f"{actor}.ppo_mini_batch_size={work.prompts}", f"actor_rollout_ref.rollout.n={work.n}",
        f"{actor}.use_kl_loss={str(work.kl_coef > 0).lower()}", f"{actor}.kl_loss_coef={work.kl_coef}",
        f"{actor}.optim.lr={work.lr}", "actor_rollout_ref.rollout.ignore_eos=true", f"actor_rollout_ref.rollout.dtype={dtype}",
        *recomputed, *types, f"{actor}.ppo_max_token_len_per_gpu={max(tokens, longest)}",
        f"critic.ppo_max_token_len_per_gpu={max(tokens, longest)}", f"reward.custom_reward_function.path={task['reward']}",
        f"trainer.device={work.device}", "trainer.n_gpus_per_node=1", "trainer.logger=[]", "trainer.val_before_train=false",
        "trainer.test_freq=-1", "trainer.save_freq=-1", f"trainer.total_training_steps={work.warmup + work.steps}",
        f"trainer.default_local_dir={run_dir}",
    ]  # fmt: skip


def follow(process: subprocess.Popen[bytes], metrics: Path) -> tuple[list[float], list[float]]:
    """Wait for the run; time of each line of ``metrics`` (perf_counter), and CPU seconds of the run until then."""
    ends: list[float] = []
    used: list[float] = []
    workers: list[psutil.Process] = []
    spent: dict[int, float] = {}
    known = 0
    while process.poll() is None:
        time.sleep(POLL_SECONDS)
        size = metrics.stat().st_size if metrics.exists() else 0
        if size == known:
            continue
        now, lines = time.perf_counter(), metrics.read_bytes().count(b"\n")
        if lines > len(ends):
            workers = workers or own_processes(psutil.Process(process.pid))
            for worker in workers:
                with suppress(psutil.Error):  # it has ended, such as a process that compiled kernels
                    spent[worker.pid] = seconds_of(worker)
            used.append(sum(spent.values()))
            ends.append(now)
        known = size
    return ends, used


def own_processes(controller: psutil.Process) -> list[psutil.Process]:
    """The controller and its child processes, without Ray's daemons."""
    found = [controller]
    for process in controller.children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            if not any(name in " ".join(process.cmdline()) for name in DAEMONS):
                found.append(process)
    return found


def seconds_of(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def measured(line: dict[str, float], rows: int, updates: int, wall: float, cpu: float) -> dict[str, Any]:
    """Report of a step, from its line of metrics.jsonl. updates: planned number."""
    phases = {name.removeprefix("timing_s/"): value for name, value in line.items() if name.startswith("timing_s/")}
    responses = round(line["response_length/mean"] * rows)
    return {
        "wall_s": wall,
        "cpu_s": cpu,
        "prompt_tokens": round(line["perf/total_num_tokens"]) - responses,
        "response_tokens": responses,
        "updates": updates - round(line["actor/skipped_updates"]),
        "phases": {name: value for name, value in phases.items() if name not in PARTS},
        "engine_moves": sum(phases.get(name, 0.0) for name in ENGINE_MOVES),
    }


def summary(work: Workload, overrides: list[str], report: dict[str, Any]) -> dict[str, Any]:
    steps, middle = report["steps"], medians(report)
    tokens = steps[0]["prompt_tokens"] + steps[0]["response_tokens"]
    phases = {name: middle[name] for name in middle if name in steps[0]["phases"]}
    return {
        "settings": asdict(work) | {"overrides": overrides},
        "tokens_per_step": tokens,
        "tokens_per_s": tokens / middle["wall_s"],
        "seconds": phases | {"step": middle["wall_s"], "cpu": middle["cpu_s"]},
        "engine_moves": statistics.median(step["engine_moves"] for step in steps),
        "share_outside_generate_log_prob_update": 1 - sum(phases.get(name, 0.0) for name in WORK) / middle["wall_s"],
        "mfu": statistics.median(report["mfu"]) if report["mfu"] else None,
        "startup_s": report["startup_s"],
        "load": os.getloadavg(),
        "run": report,
    }


def medians(report: dict[str, Any]) -> dict[str, float]:
    """Medians over a run's steps of wall_s and seconds by phase; cpu_s is a mean, because the system counts in 1/100 s."""
    steps = report["steps"]
    columns = {"wall_s": [step["wall_s"] for step in steps]}
    columns |= {name: [step["phases"][name] for step in steps] for name in steps[0]["phases"]}
    middle = {name: statistics.median(column) for name, column in columns.items()}
    return middle | {"cpu_s": statistics.fmean(step["cpu_s"] for step in steps)}


def table(reports: dict[str, dict[str, Any]]) -> str:
    """Readable table with a line per run, in milliseconds."""
    lines = [f"{'':<12}{'wall':>9}{'CPU':>9}{'tokens/s':>10}  phases, ms"]
    for name, report in reports.items():
        middle, step = medians(report), report["steps"][0]
        tokens = step["prompt_tokens"] + step["response_tokens"]
        phases = "  ".join(f"{phase} {middle[phase] * 1e3:.0f}" for phase in step["phases"])
        wall, cpu = middle["wall_s"], middle["cpu_s"]
        lines.append(f"{name:<12}{wall * 1e3:>9.0f}{cpu * 1e3:>9.0f}{tokens / wall:>10.0f}  {phases}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
