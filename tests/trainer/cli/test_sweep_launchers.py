"""Trials that submitit starts in processes of its own, on this machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from configs.sweeps.sweep_points import read_results
from tests.layout.source import ROOT
from tests.runs import make_task, metrics_of, ppo_arguments


def sweep(folder: Path, module: str, *words: str) -> list[str]:
    """The printed lines of a sweep in ``folder``, without Hydra's own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", module, "-m", "trainer.default_local_dir=x", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if not line.startswith("[")]


SEARCH = ("hydra/launcher=submitit_local", "hydra/sweeper=optuna", "hydra.sweeper.n_jobs=2", "hydra.sweeper.n_trials=2")


def test_submitit_trials_report_to_optuna_and_the_table(tmp_path: Path) -> None:
    """Two processes of submitit at the same time; their results reach the study and the table."""
    keys = ("optim.lr=tag(log,interval(1e-5,1e-3))", "optim.weight_decay=choice(0.0,0.1)")
    best, *table = sweep(tmp_path, "tests.trainer.points", *SEARCH, *keys, "trainer.seed=1", "trainer.objective=train/loss")
    results = read_results(tmp_path / "x")
    assert [(result.number, result.status, result.code) for result in results] == [(0, "finished", 0), (1, "finished", 0)]
    for result in results:
        assert result.overrides == [f"optim.lr={result.objective}", result.overrides[1]]
        assert result.overrides[1] in ("optim.weight_decay=0.0", "optim.weight_decay=0.1")
    top = max(results, key=lambda result: result.objective or 0.0)
    assert best.startswith(f"best: trial {top.number}, train/loss={top.objective:.6g} with optim.lr={top.objective}, ")
    assert [line.split()[:2] for line in table] == [["point", "status"], ["0", "finished"], ["1", "finished"]]
    assert list((tmp_path / "x/.submitit").glob("*/*_0_log.out")), "they ran in submitit's processes"


@pytest.mark.soak
def test_submitit_runs_report_to_optuna(tmp_path: Path) -> None:
    small = ppo_arguments(make_task(tmp_path / "task"), Path("x"), "trainer.total_training_steps=1")
    lr = "actor_rollout_ref.actor.optim.lr=tag(log,interval(1e-5,1e-3))"
    sweep(tmp_path, "trainer.main_ppo", *SEARCH, *small, lr, "trainer.objective=critic/score/mean")
    results = read_results(tmp_path / "x")
    assert len(results) == 2
    for result in results:
        (step,) = metrics_of(tmp_path / "x" / str(result.number))
        assert (result.status, result.objective) == ("finished", step["critic/score/mean"])
