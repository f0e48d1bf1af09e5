"""trainer.deterministic in a complete run: workers are deterministic, CPU results do not change, other kernels are reported."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tests.runs import make_task, repeatable, run_ppo
from trainer import main_sft
from trainer.cluster.determinism import KernelWatch, worker_environment
from trainer.cluster.watchdog import Watchdog
from trainer.run.events import Events
from trainer.run.run_dir import EVENTS, read_lines
from workers.controller.group import WorkerGroup

# With the setting, the first update of a worker that is not deterministic ends the run.
LOSS = """
import os
import torch
from trainer.algorithms.policy_losses import POLICY_LOSSES

def deterministic(inputs, config):
    assert torch.are_deterministic_algorithms_enabled() and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    return POLICY_LOSSES["vanilla"](inputs, config)

def doubtful(inputs, config):
    torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
    return POLICY_LOSSES["vanilla"](inputs, config)
"""
LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_task(tmp_path_factory.mktemp("sort_digits"), train_size=32, test_size=4, sft_size=32)
    (folder / "loss.py").write_text(LOSS)
    return folder


def test_deterministic_workers_give_the_same_cpu_run(task: Path, tmp_path: Path) -> None:
    plain = run_ppo(task, tmp_path / "plain")
    deterministic = run_ppo(
        task, tmp_path / "deterministic", "trainer.deterministic=true", f"{LOSS_MODE}={task}/loss.py:deterministic"
    )
    assert repeatable(deterministic) == repeatable(plain)
    assert read_lines(tmp_path / "deterministic" / EVENTS) == []


def test_nondeterministic_kernel_is_reported_once(task: Path, tmp_path: Path) -> None:
    run_ppo(task, tmp_path, "trainer.deterministic=true", f"{LOSS_MODE}={task}/loss.py:doubtful")
    (event,) = read_lines(tmp_path / EVENTS)
    assert (event["step"], event["kind"]) == (1, "not deterministic")
    assert event["text"] == "put_ has no deterministic implementation: this run may not repeat"


def test_workers_of_every_pool_are_polled_once(tmp_path: Path) -> None:
    asked: list[str] = []

    def call(group: WorkerGroup, *words: str) -> list[list[str]]:
        asked.append(group.name)
        return [[], [f"kernel_of_{group.name}"]]

    groups = [cast(WorkerGroup, SimpleNamespace(name=name)) for name in ("a", "b")]
    watch = KernelWatch(lambda: groups, Events(tmp_path), cast(Watchdog, SimpleNamespace(call=call)))
    watch.look(3)
    assert asked == ["a", "b"]
    groups[1] = cast(WorkerGroup, SimpleNamespace(name="c"))  # it was replaced
    watch.look(4)
    assert asked[2:] == ["a", "c"]
    kernels = [event["text"].split()[0] for event in read_lines(tmp_path / EVENTS)]
    assert kernels == ["kernel_of_a", "kernel_of_b", "kernel_of_c"]


def test_deterministic_vllm_is_batch_invariant() -> None:
    assert worker_environment(False, "vllm") == {}
    assert worker_environment(True, "embedded") == worker_environment(True) == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    assert worker_environment(True, "vllm") == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "VLLM_BATCH_INVARIANT": "1"}


def test_supervised_training_reports_nondeterministic_kernels(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.roles.worker.deterministic_kernels", lambda: nullcontext({"some_kernel"}))
    code = main_sft.PROGRAM(
        [
            "recipe=sort_digits", "trainer.backend=local", "trainer.logger=[]", "trainer.deterministic=true",
            f"data.train_files={task}/sft.parquet", f"data.val_files={task}/sft.parquet", f"model.path={task}/base",
            "data.train_batch_size=16", "trainer.total_training_steps=2", "trainer.test_freq=-1", "trainer.export_dir=null",
            f"trainer.default_local_dir={tmp_path}",
        ]
    )  # fmt: skip
    assert code == 0
    assert [event["text"].split()[0] for event in read_lines(tmp_path / EVENTS)] == ["some_kernel"]
