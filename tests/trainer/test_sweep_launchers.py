"""Points that submitit starts in processes of its own, on this machine and by Slurm's programs."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from configs.compose import slurm_walltime
from configs.keys import ConfigError
from configs.points import read_results
from tests.layout.source import ROOT
from tests.runs import make_task, metrics_of, ppo_arguments
from tests.slurm import stand_in
from tests.trainer.points import STARTS


def sweep(folder: Path, module: str, *words: str, environment: Mapping[str, str] | None = None) -> list[str]:
    """What a sweep in ``folder`` prints, but for Hydra's own lines."""
    environment = environment or os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", module, "-m", "trainer.default_local_dir=x", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if not line.startswith("[")]


SEARCH = ("hydra/launcher=submitit_local", "hydra/sweeper=optuna", "hydra.sweeper.n_jobs=2", "hydra.sweeper.n_trials=2")


def test_points_through_submitit_chosen_by_optuna(tmp_path: Path) -> None:
    """Two processes of submitit's at the same time; their results come back to the study and to the table."""
    keys = ("optim.lr=tag(log,interval(1e-5,1e-3))", "optim.weight_decay=choice(0.0,0.1)")
    best, *table = sweep(tmp_path, "tests.trainer.points", *SEARCH, *keys, "trainer.seed=1", "trainer.objective=train/loss")
    results = read_results(tmp_path / "x")
    assert [(result.number, result.status, result.code) for result in results] == [(0, "finished", 0), (1, "finished", 0)]
    for result in results:
        assert result.overrides == [f"optim.lr={result.objective}", result.overrides[1]]
        assert result.overrides[1] in ("optim.weight_decay=0.0", "optim.weight_decay=0.1")
    top = max(results, key=lambda result: result.objective or 0.0)
    assert best.startswith(f"best: point {top.number}, train/loss with optim.lr={top.objective}, ")
    assert [line.split()[:2] for line in table] == [["point", "status"], ["0", "finished"], ["1", "finished"]]
    assert list((tmp_path / "x/.submitit").glob("*/*_0_log.out")), "they ran in submitit's processes"


@pytest.mark.soak
def test_runs_through_submitit_chosen_by_optuna(tmp_path: Path) -> None:
    small = ppo_arguments(make_task(tmp_path / "task"), Path("x"), "trainer.total_training_steps=1")
    lr = "actor_rollout_ref.actor.optim.lr=tag(log,interval(1e-5,1e-3))"
    sweep(tmp_path, "trainer.main_ppo", *SEARCH, *small, lr, "trainer.objective=critic/score/mean")
    results = read_results(tmp_path / "x")
    assert len(results) == 2
    for result in results:
        (step,) = metrics_of(tmp_path / "x" / str(result.number))
        assert (result.status, result.objective) == ("finished", step["critic/score/mean"])


def test_points_by_slurm_end_in_time_and_go_on(tmp_path: Path) -> None:
    """Two points that need three and nine starts: one start each, then as many as submitit may begin again."""
    environment = stand_in(tmp_path / "slurm")

    launcher = ("hydra/launcher=submitit_slurm", "hydra.launcher.partition=gpu", "hydra.launcher.gpus_per_node=8")

    def ended(*words: str) -> list[list[str]]:
        asked = ("trainer.objective=-train/loss", "trainer.seed=3,9", "optim.lr=0.5", *words)
        table = sweep(tmp_path, "tests.trainer.points", *launcher, *asked, environment=environment)
        return [line.split()[:3] for line in table[1:]]

    assert ended("trainer.walltime=77") == [["0", "interrupted", "-"], ["1", "interrupted", "-"]]
    assert not (tmp_path / "slurm/told").exists(), "the same command goes on, unless more is asked for"
    again = ended("hydra.launcher.timeout_min=10", "hydra.launcher.max_num_timeout=1")
    assert again == [["0", "finished", "-0.5"], ["1", "interrupted", "-"]]
    assert sorted((tmp_path / "slurm/told").read_text().splitlines()) == ["requeue 8_0", "requeue 8_1"]
    for point in "01":
        assert (tmp_path / "x" / point / STARTS).read_text().split() == ["77", "360", "360"]
    script = (tmp_path / "slurm/batch_8.sh").read_text().splitlines()
    assert {line for line in script if line.startswith("#SBATCH")} >= {
        "#SBATCH --array=0-1%2", "#SBATCH --partition=gpu", "#SBATCH --time=10", "#SBATCH --gpus-per-node=8", "#SBATCH --nodes=1",
        "#SBATCH --ntasks-per-node=1", "#SBATCH --signal=USR2@120",
    }  # fmt: skip


def test_a_job_too_short_for_its_own_end_is_one_line() -> None:
    assert slurm_walltime(timeout_min=5, signal_delay_s=90) == "90"
    with pytest.raises(ConfigError, match=r"^hydra.launcher.timeout_min=4: must be more; of it 120 s .* and 120 s are kept"):
        slurm_walltime(timeout_min=4, signal_delay_s=120)
