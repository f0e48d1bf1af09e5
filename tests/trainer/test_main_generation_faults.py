"""A worker that dies or is stopped during generation: the run names it, and ends cleanly within a limit."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from configs.base.keys import CONFIG_DIR
from tests.runs import make_task

LIMIT = 15.0
pytestmark = pytest.mark.soak


class Run:
    """Two workers that generate long responses on Ray; one of them gets a signal after the first shard."""

    def __init__(self, task: Path, run_dir: Path, number: signal.Signals) -> None:
        self.number, self.run_dir = number, run_dir
        self.command = [
            sys.executable, "-m", "trainer.main_generation", f"data.path={task}/test.parquet",
            f"actor_rollout_ref.model.path={task}/base", "actor_rollout_ref.rollout.dtype=float32",
            "data.max_prompt_length=8", "data.max_response_length=40", "actor_rollout_ref.rollout.ignore_eos=true",
            "data.batch_size=4", f"timeouts.generate={LIMIT}",
            "trainer.device=cpu", "trainer.n_gpus_per_node=2", f"trainer.default_local_dir={run_dir}",
        ]  # fmt: skip
        environment = os.environ | {"PYTHONPATH": str(CONFIG_DIR.parent)}
        self.process = subprocess.Popen(self.command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def end(self) -> None:
        assert self.process.stdout is not None
        message = self.process.stdout.readline()
        assert message.startswith("shard"), message + self.process.communicate()[1]
        self.started = psutil.Process(self.process.pid).children(recursive=True)
        log = (self.run_dir / "logs/rank_1_workers.log").read_text()
        os.kill(int(log.split()[2].rstrip(",")), self.number)
        begun = time.monotonic()
        _, self.errors = self.process.communicate(timeout=120)
        self.seconds = time.monotonic() - begun
        _, self.left = psutil.wait_procs(self.started, timeout=0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[signal.Signals, Run]:
    task = make_task(tmp_path_factory.mktemp("task"), train_size=8, test_size=4096, sft_size=8)
    started = {number: Run(task, tmp_path_factory.mktemp(number.name), number) for number in (signal.SIGKILL, signal.SIGSTOP)}
    for run in started.values():
        run.end()
    return started


def test_killed_worker_is_named_with_cause_and_log(runs: dict[signal.Signals, Run]) -> None:
    run = runs[signal.SIGKILL]
    assert run.process.returncode == 1
    first, *lines = run.errors[run.errors.index("error: ") :].splitlines()
    assert first.startswith("error: rank 1 failed in generation (rollout engine embedded): process ")
    assert "killed by a signal" in first and lines[0] == f"last lines of {run.run_dir}/logs/rank_1_workers.log:"


def test_stopped_worker_is_named_with_limit_and_report(runs: dict[signal.Signals, Run]) -> None:
    run = runs[signal.SIGSTOP]
    assert run.process.returncode == 1
    first, *lines = run.errors[run.errors.index("error: ") :].splitlines()
    limited = rf"limited by timeouts\.generate={LIMIT:g}(, widened by what was measured)?"
    message = rf"{limited}, took more than [\d.]+ s: no answer from ranks \[1\]"
    assert re.fullmatch(rf"error: generation \(rollout engine embedded\), {message}", first), first
    assert lines[:2] == ["step 0, phase generate", "held up by rank 1: a process of it is stopped (SIGSTOP, or a debugger)"]
    kept = run.run_dir / "logs/stall_0_generate"
    assert len(lines) < 11 and lines[-1] == f"stacks, memory, logs: {kept}"
    files = {"rank_0.txt", "rank_0_collectives.json", "rank_1.txt", "memory.txt", "ray.txt", "summary.txt"}
    assert {path.name for path in kept.iterdir()} == files, "a stopped process dumps no collectives"
    assert '"kind": "stall"' in (run.run_dir / "events.jsonl").read_text()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_run_ends_cleanly_after_a_fault(runs: dict[signal.Signals, Run], number: signal.Signals) -> None:
    run = runs[number]
    assert "Traceback" not in run.errors and run.left == []
    assert run.seconds < LIMIT + 60, run.seconds
    assert not (run.run_dir / "ray").exists() and list((run.run_dir / "answers").glob("*.partial")) == []
