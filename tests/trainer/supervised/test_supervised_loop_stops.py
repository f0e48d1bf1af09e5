"""A stopped supervised run resumes bitwise; failures restart it."""

import os
import signal
import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runs import make_task, metrics_of, repeatable
from tests.trainer.ppo.test_loop_stops import events_of
from trainer import main_sft
from trainer.algorithms.losses.sft_loss import NextTokenLoss
from trainer.checkpoint.resume import find_latest
from workers.batch import Batch

STEPS = 30


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("sort_digits"))


def arguments(task: Path, run_dir: Path, *overrides: str) -> list[str]:
    return [
        "recipe=sort_digits", "trainer.backend=local", f"data.train_files={task}/sft.parquet", f"model.path={task}/base",
        "data.train_batch_size=8", f"trainer.total_training_steps={STEPS}", "trainer.resume_mode=auto", "optim.lr=1e-4",
        f"trainer.default_local_dir={run_dir}", *overrides,
    ]  # fmt: skip


def sigterm_after(lines: int, log: Path) -> None:
    """Send SIGTERM to this process when the log has ``lines`` lines."""
    while not log.exists() or len(log.read_text().splitlines()) < lines:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGTERM)


def test_stopped_run_resumes_bitwise(task: Path, tmp_path: Path) -> None:
    assert main_sft.PROGRAM(arguments(task, tmp_path / "whole", "trainer.save_freq=30")) == 0
    (tmp_path / "run").mkdir()
    sender = threading.Thread(target=sigterm_after, args=(3, tmp_path / "run" / "metrics.jsonl"))
    sender.start()
    assert main_sft.PROGRAM(arguments(task, tmp_path / "run")) == 143
    sender.join()
    latest = find_latest(tmp_path / "run")
    assert latest is not None and 3 <= latest.step < STEPS
    assert events_of(tmp_path / "run") == [(latest.step, "stop", "SIGTERM")]
    assert main_sft.PROGRAM(arguments(task, tmp_path / "run", "trainer.save_freq=30")) == 0
    whole, resumed = (metrics_of(tmp_path / name) for name in ("whole", "run"))
    assert repeatable(resumed) == repeatable(whole) and len(whole) == STEPS


def test_run_without_time_left_trains_no_step(task: Path, tmp_path: Path) -> None:
    assert main_sft.PROGRAM(arguments(task, tmp_path, "trainer.walltime=0")) == 0
    assert metrics_of(tmp_path) == [] and find_latest(tmp_path) is None


@pytest.fixture
def broken_call(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], object]], None]:
    """Call a fault once, before the n-th call of the loss, which is the project's own and therefore patched."""
    plain, calls = NextTokenLoss.__call__, count(1)

    def arrange(number: int, fault: Callable[[], object]) -> None:
        def call(self: NextTokenLoss, outputs: dict[str, torch.Tensor], micro_batch: Batch) -> object:
            if next(calls) == number:
                fault()
            return plain(self, outputs, micro_batch)

        monkeypatch.setattr(NextTokenLoss, "__call__", call)

    return arrange


def test_update_out_of_memory_is_repeated(task: Path, tmp_path: Path, broken_call: Any) -> None:
    broken_call(3, lambda: torch.empty(2**50, dtype=torch.uint8))
    saved = ("trainer.save_freq=5", "trainer.total_training_steps=5")
    assert main_sft.PROGRAM(arguments(task, tmp_path, *saved)) == 0
    ((step, kind, _),) = events_of(tmp_path)
    assert (step, kind) == (3, "out of memory")
    assert [entry.get("train/out_of_memory") for entry in metrics_of(tmp_path)] == [None, None, 1.0, None, None]
    latest = find_latest(tmp_path)
    assert latest is not None and latest.manifest.state["model_budget"]["max_tokens"] > 0


def test_failed_run_restarts_by_itself(task: Path, tmp_path: Path, broken_call: Any) -> None:
    four = (
        "trainer.save_freq=2",
        "trainer.total_training_steps=4",
        "trainer.max_restarts=1",
        "trainer.checkpoint.async_save=false",
    )
    assert main_sft.PROGRAM(arguments(task, tmp_path / "whole", *four)) == 0
    broken_call(4, lambda: 1 / 0)
    assert main_sft.PROGRAM(arguments(task, tmp_path / "run", *four)) == 0
    ((step, kind, text),) = events_of(tmp_path / "run")
    assert (step, kind) == (3, "restart") and "ZeroDivisionError" in text and text.endswith("from step 2")
    assert repeatable(metrics_of(tmp_path / "run")) == repeatable(metrics_of(tmp_path / "whole"))
