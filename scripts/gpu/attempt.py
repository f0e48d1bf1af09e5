"""One stage of a row: its commands, its time limit, and the checks of its results."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any

from scripts.gpu.cluster import Cluster
from scripts.gpu.driver import MARK, Gpu, MemoryWatch, end_all, ended, nvml, ray_workers
from scripts.gpu.rows import ACTOR, BY_NAME, RESUMED_STEPS, ROLLOUT, STEPS, Row, Sizes, Stage
from trainer.run.run_dir import EVENTS, LATEST, METRICS, START, TIMELINE, read_lines, read_metrics

ROOT = Path(__file__).parents[2]
MODULES = {"megatron": "megatron.core"}
PHASES = {  # of the forecast, by that of the timeline
    "gen": ("answers",), "old_log_prob": ("actor: log-probs",), "ref": ("ref: log-probs",), "values": ("critic: values",),
    "update_actor": ("actor: update",), "update_critic": ("critic: update",), "reward": ("reward_model: scores",),
}  # fmt: skip
LEFT_SECONDS = 60.0
"""Limit for a run's processes to end, after it or after its driver was killed."""
POLL_SECONDS = 0.1
MODEL_SECONDS = 300
LEARN = (ACTOR, "critic")
GB = 1e9


class Skipped(Exception):
    """A row cannot run here; the message states the reason."""


class Failed(Exception):
    """A check of a row failed; the message states which, in one line."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where rows run. gpus: those that rows may use; placeholders on the CPU.

    forecasts: by command. One takes up to 45 s, most of it imports, and a resume has that of its run.
    """

    out: Path
    models: Path
    runs: Path
    cpu: bool
    plan: bool
    gpus: tuple[Gpu, ...]
    forecasts: dict[str, dict[str, Any]] = field(default_factory=dict)

    def size(self, row: Row, stage: Stage) -> int:
        """GPUs of a stage: the largest power of two that is available, within the row's minimum and maximum."""
        size = 1
        while 2 * size <= min(len(self.gpus), row.most):
            size *= 2
        size = max(size, row.gpus)
        if stage.gpus is None:
            return size
        return size // -stage.gpus if stage.gpus < 0 else stage.gpus


def ready(row: Row, machine: Machine, stage: Stage, results: Sequence[dict[str, Any]] = ()) -> Row:
    """The row with an engine that is installed. Raises Skipped."""
    for name in row.packages:
        if not is_installed(name):
            raise Skipped(f"{name} is not installed")
    if not is_installed(row.engine) and not machine.plan:
        if not (row.instead or machine.cpu):
            raise Skipped(f"{row.engine} is not installed")
        if any("lora_sync=adapter" in word for word in row.overrides):
            raise Skipped(f"{row.engine} is not installed, and the embedded engine takes no adapters")
        row = replace(row, engine="embedded")
    wanted = max(row.gpus, machine.size(row, stage))
    if wanted > len(machine.gpus):
        raise Skipped(f"needs {wanted} GPUs, {len(machine.gpus)} are available")
    if row.base is not None and any(
        done["row"] == row.base and done["result"] == "failed" and done["stage"] == BY_NAME[row.base].stages[0].name
        for done in results
    ):
        raise Skipped(f"{row.base} has failed, whose checkpoint this row resumes")
    if machine.cpu and stage.kind in ("pytest", "dry_run"):
        raise Skipped("does not run on the CPU")
    least = min((gpu.bytes for gpu in machine.gpus), default=0) / GB
    if not (machine.cpu or machine.plan) and least < row.gigabytes:
        raise Skipped(f"{row.gigabytes:g} GB per GPU are needed, {least:.0f} are available")
    return row


def is_installed(name: str) -> bool:
    try:
        return name == "embedded" or find_spec(MODULES.get(name, name)) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False


class Attempt:
    """One stage of a row: runs its commands and checks their results. Fills ``record``."""

    def __init__(
        self, row: Row, stage: Stage, machine: Machine, log: Path, record: dict[str, Any], limit: int | None = None
    ) -> None:
        self.row, self.stage, self.machine, self.log, self.record = row, stage, machine, log, record
        self.run_dir = machine.runs / row.shares
        self.limit = limit or row.limit(stage)
        self.mark = str(machine.out)
        self.deadline = time.monotonic() + self.limit
        self.environment = os.environ | {
            "PYTHON": sys.executable,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "PATH": f"{self._python_on_path()}{os.pathsep}{os.environ['PATH']}",
            "DATA": str(machine.models / "data"),
            "HF_HUB_OFFLINE": "1",
            MARK: self.mark,
        }
        if machine.cpu:
            self.environment |= {"OMP_NUM_THREADS": "1"}

    def go(self) -> None:
        """Run the stage. Raises Skipped and Failed."""
        if self.stage.kind == "pytest":
            return self.pytest()
        self.make_models()
        forecast = self.forecast()
        if self.machine.plan or self.stage.kind == "dry_run":
            return
        self.check_room(forecast)
        with ended(self.mark), MemoryWatch(None if self.machine.cpu else nvml()) as memory:
            baseline = memory.driver and max(memory.driver.used())
            self.work()
        self.record |= {
            "baseline_gb": baseline and round(baseline / GB, 2),
            "peak_gb": (peak := memory.peak()) and round(peak / GB, 2),
        }
        self.measure(memory)

    def work(self) -> None:
        kind = self.stage.kind
        if kind in ("two_nodes", "two_runs"):
            with Cluster(self.log.parent, self.environment, 2 if kind == "two_nodes" else 1, self.machine.cpu) as cluster:
                address = f"+ray_kwargs.ray_init.address={cluster.address}"
                self.environment |= cluster.environment
                if kind == "two_nodes":
                    self.start([address, "trainer.nnodes=2", "trainer.n_gpus_per_node=1"], STEPS)
                    return self.check_steps(self.run_dir, [], STEPS)
                dirs = [self.run_dir.with_name(f"{self.run_dir.name}-{i}") for i in (1, 2)]
                words = [address, "trainer.n_gpus_per_node=1"]
                running = [self.begin([*words, f"trainer.default_local_dir={folder}"], STEPS) for folder in dirs]
                for process in running:
                    self.wait(process)
                for folder in dirs:
                    self.check_steps(folder, [], STEPS)
            return None
        if kind == "run":
            shutil.rmtree(self.run_dir, ignore_errors=True)
            self.start([f"trainer.save_freq={STEPS if self.row.saves else -1}"], STEPS)
            return self.check_steps(self.run_dir, [], STEPS)
        before = self.checkpointed()
        words = ["trainer.save_freq=-1"]
        if kind == "resume":
            self.start(words, RESUMED_STEPS)
            self.check_resumed()
        if kind == "kill_driver":
            process = self.begin(words, RESUMED_STEPS)
            self.until_step(process, STEPS + 1)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            self.nothing_left("after kill -9 of the driver")
            self.start(words, RESUMED_STEPS)
            self.check_resumed()
        if kind == "kill_worker":
            process = self.begin([*words, "trainer.max_restarts=1"], RESUMED_STEPS)
            self.until_step(process, STEPS + 1)
            workers = ray_workers(process.pid)
            if not workers:
                raise Failed("no worker of Ray was found among the driver's processes")
            workers[0].kill()
            self.wait(process)
            kinds = [event["kind"] for event in read_lines(self.run_dir / EVENTS)]
            if "restart" not in kinds:
                raise Failed(f"a worker was killed and no restart is among the events ({', '.join(kinds) or 'none'})")
        return self.check_steps(self.run_dir, before, RESUMED_STEPS)

    def checkpointed(self) -> list[str]:
        """Lines of metrics.jsonl up to the checkpoint. If there is none, the first stage of the row or its base writes it."""
        if not (self.run_dir / LATEST).exists():
            base = BY_NAME[self.row.shares]
            maker = base.stages[0]
            record: dict[str, Any] = {"phases": {}, "gpus": self.machine.size(base, maker)}
            log = self.log.with_name(f"{self.stage.name}.before.log")
            log.write_text("")
            limit = int(self.deadline - time.monotonic())
            Attempt(ready(base, self.machine, maker), maker, self.machine, log, record, limit).go()
        return (self.run_dir / METRICS).read_text().splitlines()[:STEPS]

    def make_models(self) -> None:
        """Create missing models and data. Needs no lock: rows run one after the other."""
        wanted = [name for name in {self.model, self.reward} if name is not None and not (self.machine.models / name).exists()]
        if wanted or not (self.machine.models / "data").exists():
            command = [sys.executable, "-m", "scripts.gpu.make", str(self.machine.models), *wanted]
            with self.log.open("ab") as output:
                try:
                    subprocess.run(
                        command, cwd=ROOT, env=self.environment, stdout=output, stderr=output, timeout=MODEL_SECONDS, check=True
                    )
                except subprocess.SubprocessError as error:
                    raise Failed(f"scripts.gpu.make {' '.join(wanted)}: {error}") from error
            self.deadline = time.monotonic() + self.limit

    @property
    def model(self) -> str:
        if self.machine.cpu:
            return "tiny-moe" if self.row.shape == "moe" else "tiny"
        return f"{self.row.shape}-plan" if self.machine.plan or self.stage.kind == "dry_run" else self.row.shape

    @property
    def reward(self) -> str | None:
        if self.row.reward is None:
            return None
        return f"{'tiny' if self.machine.cpu else self.row.reward}-reward{'-plan' if self.machine.plan else ''}"

    def forecast(self) -> dict[str, Any]:
        """Check the configuration and predict memory. Raises Failed if the configuration is refused."""
        path = self.log.with_suffix(".forecast.json")
        path.unlink(missing_ok=True)
        words = ["trainer.nnodes=2", "trainer.n_gpus_per_node=1"] if self.stage.kind == "two_nodes" else []
        words += ["trainer.n_gpus_per_node=1"] if self.stage.kind == "two_runs" else []
        command = self.command(words, STEPS)
        self.record["command"] = name = shlex.join(command)
        if name not in self.machine.forecasts:
            self.machine.forecasts[name] = self._forecast(command, path)
        forecast = self.machine.forecasts[name]
        # The driver counts torch's cache too.
        uses = [use for use in forecast["uses"] if use["bytes"] is not None]
        predicted = {use["phase"]: round((use["bytes"] + use["cached"]) / GB, 2) for use in uses}
        self.record |= {"predicted": predicted, "predicted_gb": max(predicted.values(), default=None), "torch": forecast["torch"]}
        return forecast

    def _forecast(self, command: Sequence[str], path: Path) -> dict[str, Any]:
        """Run the forecast, which writes to ``path``."""
        with ended(self.mark), self.log.open("ab") as output:
            environment = self.environment | {"GPU_ROW_FORECAST": str(path)}
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
            try:
                code = process.wait(timeout=max(0.0, self.deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise Failed(f"no forecast after the limit of {self.limit} s") from None
        if code or not path.exists():
            raise Failed(f"the configuration is refused: {self.last_line()}")
        forecast: dict[str, Any] = json.loads(path.read_text())
        return forecast

    def check_room(self, forecast: dict[str, Any]) -> None:
        """Check that GPU memory suffices by the forecast, and the disk for the checkpoint. Raises Skipped."""
        if self.machine.cpu:
            return
        gpu = min(gpu.bytes for gpu in self.machine.gpus)
        fullest = max(forecast["uses"], key=lambda use: use["bytes"] or 0.0, default=None)
        if fullest is not None and (fullest["bytes"] or 0.0) > gpu:
            what = f"{fullest['phase']} takes {fullest['bytes'] / GB:.0f} GB by the forecast"
            raise Skipped(f"{what}, a GPU here has {gpu / GB:.0f}")
        if self.stage.kind == "run" and self.row.saves and "actor_rollout_ref.model.lora_rank" not in self.record["command"]:
            # Parameters and two moments.
            sizes = {key: 6 if f"{key}.fsdp_config.model_dtype=bfloat16" in self.record["command"] else 12 for key in LEARN}
            learn = [sizes[key] * size for key, size in forecast["parameters"].items() if key in LEARN]
            need, free = sum(learn), shutil.disk_usage(self.machine.runs).free
            if need > free and "lora" not in self.row.name:
                raise Skipped(f"a checkpoint takes {need / GB:.0f} GB, {self.machine.runs} has {free / GB:.0f}: --runs")

    def command(self, words: Sequence[str], steps: int) -> list[str]:
        row, stage, data = self.row, self.stage, self.machine.models / "data"
        program = ["bash", f"scripts/{row.script}"] if row.script else ["python", "-m", "trainer.main_ppo"]
        name = "short" if self.machine.cpu else "long" if row.long else "prompts"
        paths = [
            f"data.train_files=['{data}/{name}.parquet']", f"data.val_files=['{data}/{name}.parquet']",
            f"reward.custom_reward_function.path={data}/reward.py", f"trainer.default_local_dir={self.run_dir}",
            f"actor_rollout_ref.model.path={self.machine.models / self.model}",
            f"critic.model.path={self.machine.models / self.model}",
        ]  # fmt: skip
        if self.reward is not None:
            paths.append(f"reward.reward_model.path={self.machine.models / self.reward}")
        if stage.kind == "dry_run":
            return [*program, *paths]
        return [
            *program, *paths, *sized(row.sizes.tiny() if self.machine.cpu else row.sizes), f"{ROLLOUT}.name={row.engine}",
            "trainer.logger=[]", "trainer.val_before_train=false", "trainer.test_freq=-1", "reward.num_workers=2",
            f"trainer.n_gpus_per_node={self.record['gpus']}", f"trainer.total_training_steps={steps}", *row.overrides,
            *stage.overrides, *(self.on_cpu() if self.machine.cpu else ()), *words,
        ]  # fmt: skip

    def on_cpu(self) -> Iterator[str]:
        """Overrides for the CPU: float32, and nothing that needs a GPU."""
        yield "trainer.device=cpu"
        for key in (
            f"{ACTOR}.fsdp_config",
            "actor_rollout_ref.ref.fsdp_config",
            "critic.fsdp_config",
            "reward.reward_model.fsdp_config",
        ):
            yield from (f"{key}.model_dtype=float32", f"{key}.dtype=float32")
        yield f"{ACTOR}.megatron.dtype=float32"
        yield f"{ROLLOUT}.dtype=float32"
        yield f"{ROLLOUT}.gpu_memory_utilization=0.05"
        yield f"{ROLLOUT}.enforce_eager=true"

    def start(self, words: Sequence[str], steps: int) -> None:
        self.wait(self.begin(words, steps))

    def begin(self, words: Sequence[str], steps: int) -> subprocess.Popen[bytes]:
        self.began = time.time()
        with self.log.open("ab") as output:
            command = self.command(words, steps)
            output.write(f"\n$ {shlex.join(command)}\n".encode())
            output.flush()
            return subprocess.Popen(
                command,
                cwd=ROOT,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def wait(self, process: subprocess.Popen[bytes]) -> None:
        try:
            code = process.wait(timeout=max(0.0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise Failed(f"not done after its limit of {self.limit} s: {self.last_line()}") from None
        if code:
            raise Failed(f"exit code {code}: {self.last_line()}")
        if self.stage.kind not in ("two_nodes", "two_runs"):
            self.nothing_left("after the run")

    def until_step(self, process: subprocess.Popen[bytes], step: int) -> None:
        while len(read_lines(self.run_dir / METRICS)) < step:
            if process.poll() is not None:
                raise Failed(f"ended with {process.returncode} before step {step}: {self.last_line()}")
            if time.monotonic() > self.deadline:
                raise Failed(f"step {step} is not reached after the limit of {self.limit} s: {self.last_line()}")
            time.sleep(POLL_SECONDS)

    def nothing_left(self, when: str) -> None:
        if left := end_all(self.mark, LEFT_SECONDS):
            raise Failed(f"{len(left)} processes are left {LEFT_SECONDS:.0f} s {when}: {left[0]}")

    def check_resumed(self) -> None:
        if f" from {self.run_dir / f'global_step_{STEPS}'}" not in self.log.read_text(errors="replace"):
            raise Failed(f"the log does not report that the run resumed from global_step_{STEPS}")

    def check_steps(self, run_dir: Path, before: Sequence[str], steps: int) -> None:
        """Check that each step ran once, that steps before the checkpoint are unchanged, and that metrics are sound."""
        lines = read_metrics(run_dir)
        numbers = [int(line["training/global_step"]) for line in lines]
        if numbers != [*range(1, steps + 1)]:
            raise Failed(f"{run_dir / METRICS} has the steps {numbers}, not 1 to {steps}")
        if (run_dir / METRICS).read_text().splitlines()[: len(before)] != list(before):
            raise Failed("steps from before the checkpoint ran again: their metrics differ")
        fresh = lines[len(before) :]
        for line in fresh:
            if wrong := sorted(name for name, value in line.items() if not isfinite(value)):
                raise Failed(f"step {line['training/global_step']:.0f}: not finite: {', '.join(wrong[:4])}")
            if not line.get("actor/grad_norm", 0.0) > 0 or line.get("actor/skipped_updates", 0.0):
                raise Failed(
                    f"step {line['training/global_step']:.0f}: the actor did not learn: grad_norm {line.get('actor/grad_norm')}"
                )
        gaps = [line["training/rollout_log_probs_diff_mean"] for line in fresh if "training/rollout_log_probs_diff_mean" in line]
        if len(gaps) < len(fresh):
            raise Failed("a step has no training/rollout_log_probs_diff_mean")
        self.record["mismatch"] = max(gaps)
        if max(gaps) > self.row.mismatch:
            raise Failed(
                f"log-probs of trainer and engine differ by {max(gaps):.4f} on average, {self.row.mismatch} at most are right"
            )

    def measure(self, memory: MemoryWatch) -> None:
        """Seconds by phase and peaks, of the steps that were done in this stage; the first is left out where there are others."""
        run_dir = self.run_dir.with_name(f"{self.run_dir.name}-1") if self.stage.kind == "two_runs" else self.run_dir
        spans = [line for line in read_lines(run_dir / TIMELINE) if line["spans"] and line["spans"][0][2] >= self.began]
        done = {line["training/global_step"] for line in spans}
        lines = [line for line in read_metrics(run_dir) if line["training/global_step"] in done]
        usual = lines[1:] or lines
        names = sorted({name for line in usual for name in line if name.startswith("timing_s/")})
        self.record["phases"] = {
            name.removeprefix("timing_s/"): round(statistics.median(line[name] for line in usual if name in line), 3)
            for name in names
        }
        ranges = [(phase, start, end) for line in spans for phase, _, start, end in line["spans"]]
        if saves := [end - start for phase, start, end in ranges if phase == "save_checkpoint"]:
            self.record["phases"]["save_checkpoint"] = round(max(saves), 3)
        if first := [start for phase, start, _ in ranges if phase == "gen"]:
            self.record["start_seconds"] = round(min(first) - self.began, 1)
        if (parts := run_dir / START).exists():
            self.record["start_parts"] = {name: round(spent, 1) for name, spent in json.loads(parts.read_text()).items()}
        if lines and "perf/throughput" in lines[-1]:
            self.record["tokens_per_gpu_second"] = round(statistics.median(line["perf/throughput"] for line in usual), 1)
        peaks: dict[str, float] = {}
        for phase, start, end in ranges:
            if (used := memory.peak(start, end)) is not None:
                peaks[phase] = max(peaks.get(phase, 0.0), round(used / GB, 2))
        self.record["peaks"] = peaks
        before = self.record["baseline_gb"] or 0.0
        self.record["ratios"] = {
            phase: round((self.record["predicted"][name] + before) / peaks[phase], 3)
            for phase, names in PHASES.items()
            for name in names
            if phase in peaks and name in self.record["predicted"]
        }

    def pytest(self) -> None:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-rs",
            "--override-ini=addopts=",  # so that the last line counts what passed
            "-p",
            "no:cacheprovider",
            "tests/workers/roles/test_memory_scheduler_cuda.py",
        ]
        with ended(self.mark):
            with self.log.open("ab") as output:
                process = subprocess.Popen(
                    command, cwd=ROOT, env=self.environment, stdout=output, stderr=output, start_new_session=True
                )
            self.wait(process)
        summary = self.last_line()
        if "passed" not in summary:
            raise Skipped(f"no engine is installed: {summary}" if "skipped" in summary else summary)

    def last_line(self) -> str:
        """The last error in the log, or its last line."""
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("error:") or "Error:" in line]
        return (errors or lines or ["the log is empty"])[-1][:300]

    def _python_on_path(self) -> Path:
        """A folder whose `python` is this interpreter, or forecasts what it is asked to run: scripts call it by that name."""
        folder = self.machine.out / "bin"
        folder.mkdir(exist_ok=True)
        file = folder / "python"
        file.write_text(
            '#!/usr/bin/env bash\nset -euo pipefail\nif [ -n "${GPU_ROW_FORECAST:-}" ]; then\n  shift 2\n'
            f'  exec {shlex.quote(sys.executable)} -m scripts.gpu.forecast "$@"\nfi\nexec {shlex.quote(sys.executable)} "$@"\n'
        )
        file.chmod(0o755)
        return folder


def sized(sizes: Sizes) -> Iterator[str]:
    yield f"data.train_batch_size={sizes.batch}"
    if sizes.round is not None:
        yield f"data.gen_batch_size={sizes.round}"
    yield f"{ACTOR}.ppo_mini_batch_size={sizes.mini}"
    yield f"{ROLLOUT}.n={sizes.n}"
    yield f"data.max_prompt_length={sizes.prompt}"
    yield f"data.max_response_length={sizes.response}"
