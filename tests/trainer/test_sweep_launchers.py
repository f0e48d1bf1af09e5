"""Points that submitit starts in processes of its own, on this machine and by Slurm's programs."""

import subprocess
import sys
from pathlib import Path

import pytest

from configs.compose import slurm_walltime
from configs.keys import ConfigError
from configs.points import read_results
from tests.layout.source import ROOT
from tests.runs import make_task, metrics_of, ppo_arguments
from tests.slurm import stand_in
from tests.trainer.slurm_points import STARTS


def test_points_through_submitit_chosen_by_optuna(tmp_path: Path) -> None:
    """Two processes of submitit's at the same time; their results come back to the study and to the table."""
    task = make_task(tmp_path / "task")
    words = [
        "-m", "hydra/launcher=submitit_local", "hydra/sweeper=optuna", "hydra.sweeper.n_jobs=2",
        *ppo_arguments(task, tmp_path / "search", "trainer.total_training_steps=1", "trainer.objective=critic/score/mean"),
        "actor_rollout_ref.actor.optim.lr=tag(log,interval(1e-5,1e-3))", "actor_rollout_ref.rollout.n=choice(2,4)",
    ]  # fmt: skip

    command = [sys.executable, "-m", "trainer.main_ppo", *words, "hydra.sweeper.n_trials=2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    best, *table = [line for line in done.stdout.splitlines() if not line.startswith("[")]
    results = read_results(tmp_path / "search")
    assert [(result.number, result.status, result.code) for result in results] == [(0, "finished", 0), (1, "finished", 0)]
    for result in results:
        (step,) = metrics_of(tmp_path / "search" / str(result.number))
        assert result.objective == step["critic/score/mean"]
        assert [word.partition("=")[0] for word in result.overrides] == [
            "actor_rollout_ref.actor.optim.lr", "actor_rollout_ref.rollout.n",
        ]  # fmt: skip
    top = max(results, key=lambda result: result.objective or 0.0)
    assert best.startswith(f"best: point {top.number}, critic/score/mean with actor_rollout_ref.actor.optim.lr=")
    assert [line.split()[:2] for line in table] == [["point", "status"], ["0", "finished"], ["1", "finished"]]
    assert list((tmp_path / "search/.submitit").glob("*/*_0_log.out")), "they ran in submitit's processes"


def test_points_by_slurm_end_in_time_and_go_on(tmp_path: Path) -> None:
    """Two points that need three and nine starts: one start each, then as many as submitit may begin again."""
    environment = stand_in(tmp_path / "slurm")

    def sweep(*words: str) -> list[list[str]]:
        command = [
            sys.executable, "-m", "tests.trainer.slurm_points", "-m", "hydra/launcher=submitit_slurm", "trainer.objective=-train/loss",
            "hydra.launcher.partition=gpu", "hydra.launcher.gpus_per_node=8", "trainer.default_local_dir=x", "trainer.seed=3,9", *words,
        ]  # fmt: skip
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        return [line.split()[:3] for line in done.stdout.splitlines() if not line.startswith("[")][1:]

    assert sweep("trainer.walltime=77") == [["0", "interrupted", "-"], ["1", "interrupted", "-"]]
    assert not (tmp_path / "slurm/told").exists(), "the same command goes on, unless more is asked for"
    again = sweep("hydra.launcher.timeout_min=10", "hydra.launcher.max_num_timeout=1")
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
