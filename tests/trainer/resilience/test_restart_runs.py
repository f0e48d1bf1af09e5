"""On Ray: workers die or run out of memory, and the run completes by itself."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults import DIE, TOO_MUCH, loss_that
from tests.runs import make_task, metrics_of, ppo_arguments, repeatable, run_ppo
from tests.trainer.ppo.test_loop_stops import events_of
from tests.trainer.test_main_ppo_runs import survivors

ROOT = Path(__file__).parents[3]
SAVED = ("trainer.save_freq=2", "trainer.checkpoint.async_save=false")
"""A save in progress is lost with the worker that writes it."""
FOUR, SIX = (("trainer.total_training_steps=4", *SAVED), ("trainer.total_training_steps=6", *SAVED))
ON_RAY = ("trainer.backend=ray", "trainer.max_restarts=1")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("sort_digits"))


def start(task: Path, run_dir: Path, *overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "trainer.main_ppo", *ppo_arguments(task, run_dir, *SIX, *ON_RAY, *overrides)]
    environment = os.environ | {"TANDEM_TEST_RUN": str(run_dir)}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_run_with_a_killed_worker_is_bitwise_identical(task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_TEST_RUN", str(tmp_path / "run"))
    whole = run_ppo(task, tmp_path / "whole", *FOUR, loss_that(tmp_path / "plain", "pass"))
    steps = run_ppo(task, tmp_path / "run", *FOUR, *ON_RAY, loss_that(tmp_path, f"n == 3 and {DIE}"))
    assert repeatable(steps) == repeatable(whole)
    ((step, kind, text),) = events_of(tmp_path / "run")
    assert (step, kind) == (2, "restart")
    assert re.match(r"1 of 1: rank 0 failed in .*: process ", text) and text.endswith("it resumes from step 2")
    assert "killed by a signal" in text and survivors(str(tmp_path / "run")) == []


@pytest.mark.soak
def test_out_of_memory_on_one_of_two_ranks_restarts_with_smaller_micro_batches(task: Path, tmp_path: Path) -> None:
    """Memory runs out on rank 1 in step 3 while rank 0 waits for it; in step 5 rank 1 is killed, which uses the last restart."""
    fault = f"m = dist.get_rank() and call('of_rank_1'); m == 3 and {TOO_MUCH}; m == 8 and {DIE}"
    rows = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16"
    run = start(task, tmp_path / "run", "trainer.n_gpus_per_node=2", rows, loss_that(tmp_path, fault))
    _, message = run.communicate()
    assert run.returncode == 0, message
    assert [step["training/global_step"] for step in metrics_of(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    output = events_of(tmp_path / "run")
    assert [(step, kind) for step, kind, _ in output] == [(2, "out of memory"), (2, "restart"), (4, "restart")]
    assert output[0][2].startswith(
        "actor: memory ran out in the update, at micro-batches of up to 16 rows; from now on they have 8 at"
    )
    assert re.match(r"in smaller micro-batches: rank 1 failed in .*: OutOfMemory: ", output[1][2])
    assert re.match(r"1 of 1: rank 1 failed in .*: process ", output[2][2]) and output[2][2].endswith("from step 4")
    for step in (4, 6):
        manifest = json.loads((tmp_path / "run" / f"global_step_{step}" / "manifest.json").read_text())
        assert manifest["state"]["actor_budget"] == {"max_tokens": None, "max_rows": 8}
    assert survivors(str(tmp_path / "run")) == []


@pytest.mark.soak
def test_sigterm_to_the_driver_waits_for_the_end_of_the_step(task: Path, tmp_path: Path) -> None:
    """From another process, while the driver waits for its workers."""
    run = start(task, tmp_path / "run", "trainer.save_freq=-1", loss_that(tmp_path, "time.sleep(1)"))
    while not (tmp_path / "losses").exists() and run.poll() is None:
        time.sleep(0.05)
    run.send_signal(signal.SIGTERM)
    _, message = run.communicate()
    assert run.returncode == 143, message
    assert message.splitlines()[-1].endswith(f"resumes from {tmp_path / 'run' / 'global_step_1'}")
    assert len((tmp_path / "losses").read_text()) == 1 and survivors(str(tmp_path / "run")) == []
