"""Points that submitit starts in processes of its own."""

import subprocess
import sys
from pathlib import Path

from configs.points import read_results
from tests.layout.source import ROOT
from tests.runs import make_task, metrics_of, ppo_arguments


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
